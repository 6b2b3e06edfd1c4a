"""Start a server with two tiny models, run a program with the server's address, stop the server.

    python tests/clients/serve_tiny_models.py PROGRAM [ARGUMENT ...]

The program also gets the server's address, the folder of the models (--models), and this Python (--ours). The exit
code is the program's, or 1 if the server does not end in order.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from manyheads.catalogue import build_model
from manyheads.decoding.settings import DecodingSettings, GenerationSettings
from manyheads.models.pretrained import save_pretrained
from manyheads.models.transformer import config as presets
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.vocabulary import ByteVocabulary

# Translations of some length, in whole pieces: an untrained model prefers bytes.
SETTINGS = DecodingSettings(num_beams=2, max_new_tokens=12, min_new_tokens=6, banned_ids=tuple(range(4, 260)))


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        models = [save_translator(Path(folder) / "en-de"), save_novel(Path(folder) / "novel")]
        command = [sys.executable, "-m", "manyheads", "serve", *map(str, models), "--port", "0", "--quiet"]
        ours = ["--models", folder, "--ours", sys.executable]
        languages = ["--source-lang", "en", "--target-lang", "de", "--device", "cpu"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen([*command, *languages], stderr=subprocess.PIPE, text=True, env=environment) as server:
            line = server.stderr.readline().strip()
            address = line.rpartition(" ")[2]
            code = 1
            if address.startswith("http"):
                code = subprocess.run([*sys.argv[1:], address, *ours], check=False).returncode
            else:
                print(line, server.stderr.read(), file=sys.stderr)
            server.send_signal(signal.SIGTERM)
            return code or server.wait(60)


def save_translator(folder: Path) -> Path:
    texts = ["I am hungry. Where is the station?", "Ich habe Hunger. Wo ist der Bahnhof?"] * 8
    tokenizer = Tokenizer.train(texts, TokenizerSettings(vocab_size=320))
    size = tokenizer.vocab_size
    torch.manual_seed(1)
    model = build_model(dataclasses.replace(presets.PRESETS["debug"], source_vocab_size=size, target_vocab_size=size))
    save_pretrained(model, folder, tokenizer=tokenizer, generation=SETTINGS)
    return folder


def save_novel(folder: Path) -> Path:
    vocabulary = ByteVocabulary()
    torch.manual_seed(3)
    config = TransformerXLConfig(
        vocab_size=vocabulary.vocab_size, d_model=16, num_heads=2, d_ff=24, num_layers=2, memory_len=12
    )
    save_pretrained(build_model(config), folder, tokenizer=vocabulary, generation=GenerationSettings())
    return folder


if __name__ == "__main__":
    sys.exit(main())
