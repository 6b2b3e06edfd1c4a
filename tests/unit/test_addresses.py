"""Where the project can be found, and what follows for instructions: addresses.toml, the metadata, CITATION.cff."""

import json
import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from doc_pages import site_script

import manyheads
from manyheads import installation
from manyheads.errors import MissingExtraError
from manyheads.installation import address, install_command, needing_extra

ROOT = Path(__file__).resolve().parents[2]
ADDRESSES = tomllib.loads((ROOT / "release" / "addresses.toml").read_text(encoding="utf-8"))
OF_THE_INDEX = re.compile(r"pip3? install [^\n|;&`,#]*?(?<![\w./-])manyheads(?=[\['\"`\s]|$)(?!\S* @ )")


def texts() -> list[Path]:
    """Every text of the repository that people read or that prints."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    names = names or [
        str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file() and ".venv" not in str(path)
    ]
    kinds = (".md", ".py", ".toml", ".yaml", ".yml", ".txt", ".lock", ".cff", ".ipynb", ".html", ".ts", ".mjs")
    return [ROOT / name for name in names if name.endswith(kinds) or Path(name).name in ("Makefile", "Containerfile")]


@pytest.mark.skipif(bool(ADDRESSES["index_name"]), reason="the name on the index is ours")
def test_nothing_installs_a_name_that_is_not_ours() -> None:
    found = {}
    for path in texts():
        if path != Path(__file__):
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
            found |= {
                f"{path.relative_to(ROOT)}:{n}": line for n, line in enumerate(lines, 1) if OF_THE_INDEX.search(line)
            }
    assert not found


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("pip install manyheads", True),
        ("`pip install 'manyheads[plot]'`", True),
        ("pip install --no-deps manyheads", True),
        ("pip install torch manyheads[hf]", True),
        ("pip install '.[plot]'", False),
        ("pip install -e /home/me/manyheads", False),
        ("pip install '.[plot]', in a clone of manyheads", False),
        ("pip install 'manyheads[plot] @ git+https://host/manyheads@1'", False),
    ],
)
def test_instructions_are_told_apart(line: str, is_one: bool) -> None:
    assert bool(OF_THE_INDEX.search(line)) == is_one


def test_without_addresses_there_is_no_link_and_no_badge() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert ADDRESSES.keys() == {"index_name", "repository", "documentation"}
    assert ADDRESSES["index_name"] in ("", project["name"])
    assert "urls" in project["dynamic"]
    for page in ("README.md", "README.zh-CN.md", "docs/index.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert ADDRESSES["index_name"] or not re.search(r"pypi\.org|shields\.io|badge", text), page


def record_of(place: Path, url: dict[str, Any] | None, links: tuple[str, ...] = ()) -> None:
    """Make `place` a folder of site-packages in which this copy of manyheads is installed."""
    info = place / "manyheads-0.1.0.dist-info"
    info.mkdir(parents=True)
    rows = ["torch>=2.11", "matplotlib>=3.9; extra == 'plot'", 'a-b <5,>=4 ; python_version > "3" and extra == "two"']
    rows = [*(f"Requires-Dist: {row}" for row in rows), "Requires-Dist: c; extra == 'two'"]
    head = ["Metadata-Version: 2.4", "Name: manyheads", "Version: 0.1.0", *(f"Project-URL: {link}" for link in links)]
    (info / "METADATA").write_text("\n".join([*head, *rows, "", ""]), encoding="utf-8")
    if url is not None:
        (info / "direct_url.json").write_text(json.dumps(url), encoding="utf-8")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of site-packages: the only place where metadata is found, and where this copy seems to lie."""
    place = tmp_path / "site packages"
    (place / "manyheads").mkdir(parents=True)
    module = place / "manyheads" / "installation.py"
    module.touch()
    monkeypatch.setattr(installation, "__file__", str(module))

    def distribution(name: str) -> metadata.Distribution:
        for found in metadata.Distribution.discover(name=name, path=[str(place)]):
            return found
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    return place


INDEX = "Index, https://pypi.org/project/manyheads/"


@pytest.mark.parametrize(
    ("url", "links", "extra", "command"),
    [
        (None, (), "plot", "pip install 'matplotlib>=3.9'"),
        (None, (), "two", "pip install 'a-b<5,>=4' c"),
        (None, (INDEX,), "plot", "pip install 'manyheads[plot]'"),
        (None, (), "", "pip install ., in a clone of manyheads"),
        ({"url": "FOLDER", "dir_info": {"editable": True}}, (INDEX,), "plot", "pip install -e 'FOLDER[plot]'"),
        ({"url": "FOLDER", "dir_info": {}}, (), "plot", "pip install 'FOLDER[plot]'"),
        ({"url": "FOLDER/m.whl", "archive_info": {}}, (), "plot", "pip install 'FOLDER/m.whl[plot]'"),
        ({"url": "FOLDER/gone.whl", "archive_info": {}}, (), "plot", "pip install 'matplotlib>=3.9'"),
        ({"url": "https://h/m.whl", "archive_info": {}}, (), "plot", "pip install 'manyheads[plot] @ https://h/m.whl'"),
        (
            {"url": "https://h/m", "vcs_info": {"vcs": "git", "commit_id": "ab1"}, "subdirectory": "s"},
            (),
            "plot",
            "pip install 'manyheads[plot] @ git+https://h/m@ab1#subdirectory=s'",
        ),
    ],
)
def test_the_command_is_that_of_this_copy(url, links, extra, command, site):
    folder = site.parent / "my clone"
    folder.mkdir()
    (folder / "m.whl").touch()
    if url is not None:
        url["url"] = url["url"].replace("FOLDER", folder.as_uri())
        if url.get("dir_info", {}).get("editable"):
            url["url"] = site.as_uri()  # where this copy lies
            folder = site
    record_of(site, url, links)
    assert install_command(extra) == command.replace("FOLDER", str(folder))
    assert address("Index") == (INDEX.partition(", ")[2] if links else None)
    with pytest.raises(MissingExtraError, match="Plots need x: pip install"), needing_extra("Plots need x", "plot"):
        raise ImportError


def test_a_copy_without_metadata_and_one_beside_an_installed_one(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert install_command("plot") == "pip install '.[plot]', in a clone of manyheads"
    clone = site / "clone"
    (clone / "src" / "manyheads").mkdir(parents=True)
    (clone / "pyproject.toml").touch()
    monkeypatch.setattr(installation, "__file__", str(clone / "src" / "manyheads" / "installation.py"))
    assert install_command("plot") == f"pip install '{clone}[plot]'"
    record_of(site, None, (INDEX,))  # another copy is installed
    assert install_command("plot") == f"pip install '{clone}[plot]'"
    assert address("Index") is None
    (site / "manyheads-0.1.0.dist-info" / "direct_url.json").write_text("{", encoding="utf-8")
    assert install_command("plot") == f"pip install '{clone}[plot]'"


def test_the_site_names_the_index_once_the_name_is_ours() -> None:
    pytest.importorskip("latex2mathml", reason="no latex2mathml; pip install '.[docs]'")
    pages = site_script("pages")
    page = "`pip install '.[plot]'`\n\n```\npip install .\npip install ./other\n```\n"
    named = "`pip install 'manyheads[plot]'`\n\n```\npip install manyheads\npip install ./other\n```\n"
    assert pages.with_index_name(page, "manyheads") == named


def test_the_citation_file() -> None:
    """The keys that CFF 1.2.0 requires, for the work and for each reference, and the version of the package."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == manyheads.__version__
    assert citation["license"] == "Apache-2.0"
    assert citation.get("repository-code", "") == ADDRESSES["repository"]
    for work in [citation, *citation["references"]]:
        assert work["title"]
        assert all(author.keys() <= {"name", "family-names", "given-names"} for author in work["authors"])
    assert {"arXiv:1706.03762", "arXiv:1901.02860", "arXiv:2001.04451"} == {
        one["identifiers"][0]["value"] for one in citation["references"]
    }
    assert all({"type", "authors", "title"} <= one.keys() for one in citation["references"])
