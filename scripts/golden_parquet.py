#!/usr/bin/env python3
"""Writes tests/golden/data/*.parquet as Hugging Face's `datasets` does, for tests/data/data_sources.rs."""

import pathlib

import pyarrow.parquet
from datasets import Dataset


def row(level, messages):
    return {"messages": messages, "level": level, "scores": [0.5, float(level)], "note": None if level % 2 else "even"}


def turns(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


rows = [row(1, turns("1+1?", "zwei: é漢")), row(2, turns("1+2?", "3")), row(3, turns("2+2?", "4")), row(4, None), row(5, turns("5?", "5"))]
folder = pathlib.Path(__file__).parent.parent / "tests/golden/data"
folder.mkdir(parents=True, exist_ok=True)
for compression in ["snappy", "zstd"]:
    table = Dataset.from_list(rows).data.table
    pyarrow.parquet.write_table(table, folder / f"{compression}.parquet", row_group_size=2, compression=compression)
