#!/usr/bin/env python3
"""Makes a token file from text, with the model's own tokenizer.

    python3 jobs/tokenize_text.py --model DIRECTORY --length 512 --samples 256 --output calibration.npy TEXT...

TEXT: UTF-8 files, or folders whose .txt and .md files are taken. A form feed on its own line, a file's end, and in a .jsonl file (objects with a
"text") a line's end, end a document. Documents are joined with the end-of-text token and cut into sequences of --length tokens. When there
are more sequences than --samples, a choice by --seed is kept, in text order. The output is int32 [samples, length] as .npy, or with
--ragged one document a sequence, as .jsonl. Needs numpy and tokenizers.
"""

import argparse
import json
import pathlib
import random
import sys

import numpy as np
from tokenizers import Tokenizer


def text_files(paths):
    """The files to read, folders expanded in name order."""
    for path in paths:
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md") and file.is_file())
        else:
            yield path


def documents(paths):
    """Texts of all documents, in order."""
    for path in text_files(paths):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            parts = [json.loads(line)["text"] for line in text.splitlines() if line.strip()]
        else:
            parts = text.split("\f\n")
        yield from (part for part in parts if part.strip())


def separator_token(model, tokenizer):
    """The end-of-text token's id that goes between documents; None where the model names none.
    A chat model's eos ends a turn, so the tokenizer's <|endoftext|> comes first where there is one."""
    candidates = ["<|endoftext|>", "<|end_of_text|>"]
    config = model / "tokenizer_config.json"
    if config.is_file():
        eos = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
        candidates.append(eos["content"] if isinstance(eos, dict) else eos)
    for candidate in candidates:
        if candidate and tokenizer.token_to_id(candidate) is not None:
            return tokenizer.token_to_id(candidate)
    return None


def choose(sequences, samples, seed):
    """At most `samples` of the sequences, in their order."""
    if not samples or len(sequences) <= samples:
        return sequences
    kept = sorted(random.Random(seed).sample(range(len(sequences)), samples))
    return [sequences[i] for i in kept]


def packed_sequences(token_lists, separator, length):
    """Documents joined and cut into full sequences; the rest at the end is dropped."""
    stream = []
    for tokens in token_lists:
        stream.extend(tokens)
        if separator is not None:
            stream.append(separator)
    return [stream[i : i + length] for i in range(0, len(stream) - length + 1, length)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="+", type=pathlib.Path)
    parser.add_argument("--model", required=True, type=pathlib.Path, help="directory with tokenizer.json")
    parser.add_argument("--output", required=True, type=pathlib.Path, help=".npy, or .jsonl")
    parser.add_argument("--length", type=int, default=2048, help="tokens a sequence (default 2048)")
    parser.add_argument("--samples", type=int, default=0, help="sequences to keep (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ragged", action="store_true", help="one document a sequence, cut at --length; .jsonl only")
    arguments = parser.parse_args()
    if arguments.output.suffix not in (".npy", ".jsonl"):
        parser.error(f"--output: expected .npy or .jsonl, found '{arguments.output}'")
    if arguments.ragged and arguments.output.suffix == ".npy":
        parser.error("--ragged needs a .jsonl output")
    if arguments.length < 1 or arguments.samples < 0:
        parser.error("--length must be at least 1 and --samples at least 0")
    try:
        tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    except Exception as error:  # the tokenizers library raises plain Exception
        sys.exit(f"tokenize_text.py: {arguments.model}/tokenizer.json: {error}")
    tokenizer.no_truncation()
    try:
        texts = list(documents(arguments.text))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError) as error:
        sys.exit(f"tokenize_text.py: {error}")
    token_lists = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]

    if arguments.ragged:
        sequences = [tokens[: arguments.length] for tokens in token_lists if tokens]
    else:
        sequences = packed_sequences(token_lists, separator_token(arguments.model, tokenizer), arguments.length)
    if not sequences:
        total = sum(map(len, token_lists))
        sys.exit(f"tokenize_text.py: {len(texts)} documents hold {total} tokens, fewer than one sequence of {arguments.length}")
    sequences = choose(sequences, arguments.samples, arguments.seed)
    if arguments.samples and len(sequences) < arguments.samples:
        print(f"tokenize_text.py: the text fills {len(sequences)} sequences, {arguments.samples} were asked for", file=sys.stderr)

    if arguments.output.suffix == ".npy":
        np.save(arguments.output, np.asarray(sequences, dtype=np.int32))
    else:
        arguments.output.write_text("".join(json.dumps({"input_ids": sequence}) + "\n" for sequence in sequences))
    tokens = sum(map(len, sequences))
    print(f"{arguments.output}: {len(sequences)} sequences, {tokens} tokens, from {len(texts)} documents")


if __name__ == "__main__":
    main()
