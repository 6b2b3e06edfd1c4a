"""Writing, checking and reading of model folders.

    model/   config.json  model.safetensors  README.md  manifest.json
             and, if given, tokenizer.json (or another toolkit's files)  generation_config.json

Names in the file are the body's (`encoder.layers.0.self_attn.q_proj.weight`), and the head's with `head.` in front; a
tied matrix is stored once. Nothing in a folder can execute code: the formats are safetensors and JSON.
"""

from __future__ import annotations

import functools
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast

import torch
import yaml
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from manyheads.catalogue import ARCHITECTURES, MODEL_TASKS, build_model, foreign_entries
from manyheads.checkpoint.format import needed_bytes, write_tensors
from manyheads.config.build import build
from manyheads.config.files import load_yaml, to_json, to_plain
from manyheads.data.corpora import NOTICES
from manyheads.errors import CheckpointError, ConfigError, ManyHeadsError, ModelFileError, RequestError, SaveError
from manyheads.files.commit import write_folder
from manyheads.files.safe_open import read_limited
from manyheads.files.verify import MANIFEST, read_object, verify_folder
from manyheads.models.hub import resolve_model_path

if TYPE_CHECKING:
    from manyheads.models.protocols import Composite, ModelConfig
    from manyheads.text.sides import LanguagePair

FORMAT_VERSION = 1
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
GENERATION = "generation_config.json"
_MOST_CONFIG_BYTES = 1 << 20
_MOST_READINGS = 10
_CARD = "README.md"
_MOST_CARD_BYTES = 1 << 20
_HEADING = "## Data and licence"
_NOTICE = re.compile(rf"^{_HEADING}[ \t]*\n(.*?)(?=^#{{1,2}} |\Z)", re.MULTILINE | re.DOTALL)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# The attention layers whose heads a setting counts.
_COUNTED_LAYERS = {
    "encoder_heads": "encoder.layers.{}.self_attn.",
    "decoder_heads": "decoder.layers.{}.self_attn.",
    "cross_heads": "decoder.layers.{}.cross_attn.",
    "layer_heads": "layers.{}.attention.",
}

P = ParamSpec("P")
T = TypeVar("T")


class HasFiles(Protocol):
    """The part of a tokenizer that a model folder needs."""

    def files(self) -> Mapping[str, bytes]:
        """Return the files to write: name -> content."""


def portable_name(name: str) -> str:
    """Return a composite's parameter name in files, without the prefixes of composite and compiler."""
    return name.replace("_orig_mod.", "").removeprefix("body.")


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the composite without wrappers: DDP and averaging store it as `module`, torch.compile as `_orig_mod`."""
    while True:
        children = dict(model.named_children())
        inner = children.get("_orig_mod", children.get("module"))
        if inner is None:
            return model
        model = inner


def portable_state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and saved buffers under their names in files; a tied parameter occurs once, under its first
    name.

    Wrappers around the composite (DDP, torch.compile, averaging) have no effect.
    """
    first: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in _unwrapped(model).state_dict(keep_vars=True).items():
        first.setdefault(id(tensor), (name, tensor))
    return {portable_name(name): tensor.detach() for name, tensor in first.values()}


def load_portable_state(model: nn.Module, tensors: Mapping[str, Tensor], where: str = "the weights") -> None:
    """Copy tensors into a model in place.

    Raises: ModelFileError: a name is missing or unknown, or a shape differs; the first few are listed.
    """
    own = portable_state(model)
    _check_fit(tensors, own, where)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def _check_fit(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], where: str) -> None:
    problems = [f"{name} is missing" for name in own if name not in tensors]
    problems += [f"{name} is not part of this model" for name in tensors if name not in own]
    problems += [
        f"{name} has shape {tuple(tensors[name].shape)}, the model needs {tuple(own[name].shape)}"
        for name in own
        if name in tensors and tensors[name].shape != own[name].shape
    ]
    problems += [
        f"{name} holds {tensors[name].dtype}, the model needs {own[name].dtype}"
        for name in own
        if name in tensors and tensors[name].is_floating_point() != own[name].is_floating_point()
    ]
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise ModelFileError(f"{where} do not fit the model of this config: {'; '.join(problems[:5])}{more}.")


def save_pretrained(
    model: Composite,
    path: str | Path,
    *,
    tokenizer: HasFiles | None = None,
    generation: Any = None,
    card: str | None = None,
    weights: Mapping[str, Tensor] | None = None,
    more: Mapping[str, bytes] | None = None,
    task: str | None = None,
    languages: Sequence[LanguagePair] = (),
    replace: bool = True,
    dtype: torch.dtype | None = None,
    data: str = "",
) -> None:
    """Write a model folder atomically.

    Args:
        model: the composite.
        path: the folder.
        tokenizer: saved with the weights, so that the folder can process text.
        generation: decoding settings, a dataclass.
        card: README.md; None writes a short one.
        weights: other values under the same names, such as an average; None: the model's.
        more: further files, name -> content.
        task: what the model was trained for, a name in `catalogue.TASKS`; None: it is not recorded.
        languages: source and target language of each direction that it translates, as in BCP 47, if known.
        replace: replace an existing folder.
        dtype: round the weights to this type, such as torch.bfloat16, which halves the file; `load` gives float32.
            None: as they are.
        data: what it was trained on, as in `data.path`; the card then names the source and licence of embedded data.
            What the cards of models said that it was made from (`data_notice`) stays in its own.

    Raises: SaveError: it could not be written, it exists and is not to be replaced, or some of its weights were rounded
        for decoding, or are too large for dtype; an older folder is unchanged. RequestError: dtype is no floating type.
    """
    tensors = _rounded(weights or _unrounded_state(model, path), dtype)
    text = card or _card(model, tensors, languages)
    if _NOTICE.search(text) is None:
        named = f"Its training data: {NOTICES[data]}." if data in NOTICES else ""
        text += notice_section(named, getattr(_unwrapped(cast(nn.Module, model)), "data_notice", ""))

    def write(folder: Path) -> dict[str, str]:
        digest = write_tensors(folder / WEIGHTS, tensors)
        config = {
            "format_version": FORMAT_VERSION,
            "model_type": "manyheads",
            **({} if task is None else {"task": task}),
        }
        config |= {"languages": [list(pair) for pair in languages]} if languages else {}
        config |= {"plugins": plugins} if (plugins := foreign_entries(model.config)) else {}
        config |= to_plain(model.config)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (folder / _CARD).write_text(text, encoding="utf-8")
        for name, content in {**({} if tokenizer is None else tokenizer.files()), **(more or {})}.items():
            (folder / name).write_bytes(content)
        if generation is not None:
            (folder / GENERATION).write_text(to_json(generation), encoding="utf-8")
        return {WEIGHTS: digest}

    write_folder(Path(path), write, needed_bytes=needed_bytes({"model": tensors}), replace=replace)


def _unrounded_state(model: Any, path: str | Path) -> dict[str, Tensor]:
    """Return `portable_state`, unless only the linear layers have another type, as after decoding in bf16.

    In that case the original weights and the tying are lost.
    """
    tensors = portable_state(model)
    types = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values() if tensor.is_floating_point()}
    if len(types) > 1:
        raise SaveError(
            f"{path} is not written: the model's weights are partly {' and partly '.join(sorted(types))}, as a"
            " Translator or Generator in bf16 leaves them. Load the model again, in fp32, to save it."
        )
    return tensors


def _rounded(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the tensors with floating ones in another type. Raises: see `save_pretrained`."""
    if dtype is None:
        return dict(tensors)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise RequestError(f"dtype {dtype!r} is no floating type of torch; use torch.bfloat16, or leave it out.")
    rounded = {name: one.to(dtype) if one.is_floating_point() else one for name, one in tensors.items()}
    for name, tensor in rounded.items():
        if not torch.equal(tensor.isfinite(), tensors[name].isfinite()):
            raise SaveError(f"{name} has numbers that are too large for {dtype}; save it in torch.bfloat16 or float32.")
    return rounded


def unmixed(read: Callable[P, T]) -> Callable[P, T]:
    """Decorate a reader of model folders: it reads again if one was replaced meanwhile, and never mixes two models.

    The first argument (after a class) or `path` is a path or several. Errors of the system become a ModelFileError.
    """

    @functools.wraps(read)
    def reader(*args: P.args, **kwargs: P.kwargs) -> T:
        given: Any = kwargs.get("path") or next((one for one in args if not isinstance(one, type)), ())
        paths = [Path(one) for one in ([given] if isinstance(given, str | Path) else given)]
        for _ in range(_MOST_READINGS):
            before = [_state_of(path) for path in paths]
            try:
                result = read(*args, **kwargs)
            except (ManyHeadsError, OSError) as error:
                if before == [_state_of(path) for path in paths]:
                    if isinstance(error, FileNotFoundError):
                        raise ModelFileError(f"{error.filename or given} cannot be read: {error.strerror}.") from error
                    raise
            else:
                if before == [_state_of(path) for path in paths]:
                    return result
            time.sleep(0.05)
        raise ModelFileError(f"{given} was replaced again and again while it was read; try again.")

    return reader


def _state_of(path: Path) -> list[tuple[int, int, bytes] | None]:
    """Return what changes when a model folder, or model/ of a run, is replaced; renaming changes a folder's ctime."""
    found: list[tuple[int, int, bytes] | None] = []
    for folder in (path, path / "model"):
        try:
            manifest = (folder / MANIFEST).read_bytes()
            status = folder.stat()
            found.append((status.st_ino, status.st_ctime_ns, manifest))
        except OSError:
            found.append(None)
    return found


@unmixed
def load(
    path: str | Path, *, device: str | torch.device = "cpu", verify: bool = True, revision: str | None = None
) -> Any:
    """Return the composite of an architecture (see `catalogue.MODEL_TASKS`), in evaluation mode and float32.

    Args:
        path: a model folder, a run folder (its model/ is used), or `owner/name` on the Hugging Face hub.
        device: device of the weights.
        verify: first compare every file with the manifest's SHA-256.
        revision: of a hub model.

    Raises: ModelFileError: files are missing, damaged, of another format version, or pickled. ConfigError: bad config.
    """
    folder = resolve_model_path(path, revision=revision)
    if verify:
        _verify(folder)
    config = read_config(folder)
    tensors = _read_weights(folder, config)
    with torch.device("meta"), _Uninitialised():
        model = build_model(config)
    _check_fit(tensors, portable_state(model), str(folder / WEIGHTS))  # before allocating memory for the config's sizes
    model.to_empty(device=device)
    model.tie_weights()
    load_portable_state(model, tensors, where=str(folder / WEIGHTS))
    model.data_notice = data_notice(folder)  # for the card of what is made from it
    return model.eval()


class _Uninitialised(TorchFunctionMode):
    """Skips random initial values: the meta device stores no values, and torch would import its compiler for them,
    which takes half of the time that a command needs to start.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func.__name__ in ("normal_", "uniform_"):
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Return the verified tensors of a model folder, by their names in files.

    Raises: as `load`.
    """
    _verify(folder)
    return _read_weights(folder, read_config(folder))


def _verify(folder: Path) -> None:
    if not (folder / MANIFEST).exists():
        read_config(folder)  # gives a better error for a folder of another program
        _find_weights(folder)
        raise ModelFileError(
            f"{folder} has no {MANIFEST}, without which damage cannot be seen; copy the whole folder again, or load it"
            " with verify=False."
        )
    try:
        verify_folder(folder, strict=False)
    except CheckpointError as error:
        raise ModelFileError(str(error)) from error


def read_config(folder: Path) -> Any:
    """Return the architecture's config of a model folder.

    Raises: ModelFileError: config.json is missing, not JSON, or of a newer format. ConfigError: it contains an unknown
        or bad setting.
    """
    file = folder / CONFIG
    try:
        values = read_object(file, _MOST_CONFIG_BYTES)
    except FileNotFoundError as error:
        raise ModelFileError(f"{folder} is not a model folder: it has no {CONFIG}.") from error
    return config_of(values, str(file))


def config_of(values: dict[str, Any], file: str) -> Any:
    """Return the config that a config.json holds. Args: values: the content, which is changed. Raises: as above."""
    version = values.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise ModelFileError(
            f"{file} has format_version {version!r}; this manyheads reads {FORMAT_VERSION}."
            " Install a newer manyheads, or convert the model."
        )
    values.pop("model_type", None)  # for transformers, see `extras.hf`
    values.pop("task", None)  # for `tasks.report.task_of_folder`
    values.pop("languages", None)  # for `read_languages`
    plugins = values.pop("plugins", None)
    needs = f" The model needs {', '.join(map(str, plugins))}: install it, or give --plugin." if plugins else ""
    name = values.get("architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ConfigError(f"{file}: architecture {name!r} is unknown; there are {known}.{needs}")
    for setting, layer in _layers_without_heads(values):
        values[setting][layer] = 1  # see `_add_heads`
    try:
        return build(ARCHITECTURES[name].config, values, file, "model")
    except ConfigError as error:
        raise ConfigError(f"{error}{needs}") from error


def _layers_without_heads(values: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return setting and number of the layers of which 0.1.0 pruned all heads."""
    lists = {name: values[name] for name in _COUNTED_LAYERS if isinstance(values.get(name), list)}
    return [(name, layer) for name, counts in lists.items() for layer, count in enumerate(counts) if count == 0]


def _add_heads(tensors: dict[str, Tensor], folder: Path, config: Any) -> None:
    """Give each layer of which 0.1.0 pruned all heads one head of zeros, so that its output is its bias, as it was.

    Training does not change them, because their gradients are zeros.
    """
    empty = _layers_without_heads(read_object(folder / CONFIG, _MOST_CONFIG_BYTES))
    if empty:
        with torch.device("meta"), _Uninitialised():
            own = portable_state(build_model(config))
        layers = tuple(_COUNTED_LAYERS[setting].format(layer) for setting, layer in empty)
        added = {name: one.shape for name, one in own.items() if name.startswith(layers) and name not in tensors}
        if sum(map(math.prod, added.values())) <= sum(one.numel() for one in tensors.values()):  # not a trap
            tensors |= {name: torch.zeros(shape) for name, shape in added.items()}


def read_languages(folder: Path) -> tuple[LanguagePair, ...]:
    """Return source and target language of each direction that a model folder records; empty if they are unknown.

    Raises: ModelFileError: config.json cannot be read, or they are no pairs of texts.
    """
    file = folder / CONFIG
    pairs = read_object(file, _MOST_CONFIG_BYTES).get("languages", [])
    is_known = isinstance(pairs, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(one, str) for one in pair) for pair in pairs
    )
    if not is_known:
        raise ModelFileError(f'{file}: languages must be a list of pairs, for example [["en", "de"]].')
    return tuple((source, target) for source, target in pairs)


def data_notice(folder: Path) -> str:
    """Return what the card of a model folder says about its data and licence; empty: nothing.

    Cards of 0.1.0 do not say it, but the run that they belong to names its data.
    """
    try:
        card = read_limited(folder / _CARD, _MOST_CARD_BYTES).decode("utf-8", "replace")
    except OSError:
        card = ""
    if (found := _NOTICE.search(card)) is not None:
        return found[1].strip()
    try:
        data = load_yaml(folder.parent / "config.yaml").section("data").get("path") if folder.name == "model" else ""
    except ConfigError:
        return ""
    return f"Its training data: {NOTICES[data]}." if isinstance(data, str) and data in NOTICES else ""


def notice_section(*notices: str) -> str:
    """Return the section of a card with these notices, each paragraph once; empty if there is none."""
    paragraphs = dict.fromkeys(part.strip() for notice in notices for part in notice.split("\n\n") if part.strip())
    return "\n".join(["", _HEADING, *(f"\n{part}" for part in paragraphs), ""]) if paragraphs else ""


def write_notice(source: Path, target: Path) -> None:
    """Write a card with the notice of a model folder into a folder of another format; without a notice no file."""
    if notice := data_notice(source):
        (target / _CARD).write_text(notice_section(notice).lstrip(), encoding="utf-8")


def _find_weights(folder: Path) -> Path:
    file = folder / WEIGHTS
    if not file.is_file():
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
        hint = (
            f" {pickled[0]} is a pickle, which can run code when opened, and is refused; convert it to safetensors."
            if pickled
            else ""
        )
        raise ModelFileError(f"{folder} has no {WEIGHTS}.{hint}")
    return file


def _read_weights(folder: Path, config: Any) -> dict[str, Tensor]:
    file = _find_weights(folder)
    try:
        with safe_open(file, framework="pt") as reader:
            names = list(reader.keys())
            num_values = sum(math.prod(reader.get_slice(name).get_shape()) for name in names)
            check_size(config, num_values, len(names), str(file))
            tensors = {name: reader.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{file} is not an intact safetensors file: {error}.") from error
    _add_heads(tensors, folder, config)
    return tensors


def check_size(config: ModelConfig, num_values: int, num_tensors: int, where: str) -> None:
    """Refuse a config that describes far more than its weights contain, before anything of that size is built.

    Raises: ModelFileError: there are fewer tensors than layers, or fewer numbers than in the largest matrix.
    """
    layers, widest = config.lower_bounds()
    if layers > num_tensors or widest > num_values:
        raise ModelFileError(
            f"{where}: {num_values:,} numbers in {num_tensors} tensors are far fewer than the config describes"
            f" ({layers:,} layers, largest matrix {widest:,}); the two do not belong together."
        )


def usage_example(task: str, languages: Sequence[LanguagePair] = (), *, into: str | None = None) -> str:
    """Return Python code that uses a model of the current folder.

    Args:
        languages: its directions; several have tags.
        into: the target language to choose; None: that of the first of several directions.
    """
    into = languages[0][1] if into is None and len(languages) > 1 else into
    chosen = 'from_pretrained(".")' + (f'.into("{into}")' if into else "")
    return MODEL_TASKS[task].example.replace('from_pretrained(".")', chosen)


def yaml_list(texts: Sequence[str]) -> str:
    """Return texts as a list in one line of YAML, where the language `no` needs quotes: without them it is false."""
    return yaml.safe_dump(list(texts), default_flow_style=True, width=math.inf).rstrip()


def table_cell(text: str) -> str:
    """Return a text for a cell of a table in Markdown, which a bar, as in sacreBLEU's signatures, would end."""
    return text.replace("|", "\\|")


def _card(
    model: Composite,
    tensors: Mapping[str, Tensor],
    languages: Sequence[LanguagePair] = (),
) -> str:
    name = model.config.architecture
    task = ARCHITECTURES[name].task
    known = list(dict.fromkeys(one for pair in languages for one in pair))
    header = f"language: {yaml_list(known)}\n" if known else ""
    directions = ", ".join(f"{source} to {target}" for source, target in languages)
    more = f"It translates from {directions}.\n\n" if directions else model.card_text()
    return f"""---
{header}library_name: manyheads
tags: [{task}, {name}]
---
# A {name} trained with manyheads

{more}{sum(t.numel() for t in tensors.values()):,} parameters: {model.config.describe()}.

```python
{usage_example(task, languages)}
```
"""
