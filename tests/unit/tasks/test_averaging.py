"""The model folder of averaged checkpoints."""

from pathlib import Path

from tiny_run import TINY, changed

from manyheads.extras.shortlists.shortlist import SHORTLIST
from manyheads.models.pretrained import load, read_languages, save_pretrained
from manyheads.tasks.averaging import average_run
from manyheads.text.of_folder import tokenizer_of_folder
from manyheads.training.run.loop import train


def test_the_card_of_an_average_chooses_a_language_as_that_of_the_run(tmp_path: Path) -> None:
    run, output, languages = tmp_path / "run", tmp_path / "average", [("en", "de"), ("en", "fr")]
    train(changed(TINY, run_dir=str(run), training={"max_steps": 2}))
    tokenizer = tokenizer_of_folder(run / "model")
    more = {SHORTLIST: b"a shortlist"}
    save_pretrained(load(run / "model"), run / "model", tokenizer=tokenizer, languages=languages, more=more)
    average_run(run, output, last=1)
    assert (output / SHORTLIST).read_bytes() == b"a shortlist"
    assert read_languages(output) == tuple(languages)
    call = 'Translator.from_pretrained(".").into("de")'
    assert all(call in (folder / "README.md").read_text("utf-8") for folder in (run / "model", output))
