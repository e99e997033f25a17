"""Rows of tables: Parquet files, and folders that Hugging Face `datasets` saved (`save_to_disk`).

Both are Arrow record batches, and are read a batch at a time. A row is named by its index from 0, as in `dataset[i]`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from capture.rows.chat import InputError, Refused, first_line, without_nulls

BATCH = 256
STATE = "state.json"
SPLITS = "dataset_dict.json"
MEDIA = ("Image", "Audio", "Video", "Pdf")  # features that are kept as they are stored, never opened


def is_parquet(path: Path) -> bool:
    """Whether a file says of itself that it is Parquet."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PAR1"
    except OSError:
        return False


def read_parquet(path: Path, wanted: Collection[str] | None = None) -> Iterator[tuple[int, dict[str, Any] | Refused]]:
    """The rows of a Parquet file with their indices.

    A value that Python cannot hold costs its row, or only itself where its column is none of `wanted`. Raises
    `InputError` for a file that is none, or is damaged.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield from _rows(path, file.schema_arrow, file.iter_batches(batch_size=BATCH), wanted)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read as Parquet: {first_line(error)}; copy it again") from error


def saved_files(folder: Path) -> list[Path]:
    """The files of a folder that `save_to_disk` made, in their order. Raises `InputError` where it is damaged."""
    try:
        return [folder / file["filename"] for file in json.loads((folder / STATE).read_bytes())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / STATE} cannot be read: {first_line(error)}; save the dataset again") from error


def read_saved(folder: Path, wanted: Collection[str] | None = None) -> Iterator[tuple[int, dict[str, Any] | Refused]]:
    """The rows of a saved dataset with their indices over all of its files; `wanted` as in `read_parquet`.

    Raises `InputError`.
    """
    import pyarrow

    index = 0
    for path in saved_files(folder):
        try:
            with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as batches:
                for _, row in _rows(path, batches.schema, batches, wanted):
                    yield index, row
                    index += 1
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{path} cannot be read as Arrow: {first_line(error)}; save the dataset again") from error


def _rows(
    path: Path, schema: Any, batches: Iterable[Any], wanted: Collection[str] | None
) -> Iterator[tuple[int, dict[str, Any] | Refused]]:
    if several := [name for name, count in Counter(schema.names).items() if count > 1]:
        raise InputError(f"{path} has several columns called {several[0]!r}: give each a name of its own")
    features, index = _features(schema), 0
    for batch in batches:
        for start in range(0, batch.num_rows, BATCH):
            for row in _convert(batch.slice(start, BATCH), wanted):
                yield index, row if isinstance(row, Refused) else _decode(_without_nulls(row), features)
                index += 1


def _convert(rows: Any, wanted: Collection[str] | None) -> Iterator[dict[str, Any] | Refused]:
    """Arrow's rows as Python's: text there need not be UTF-8, and a date may be one that Python has not got."""
    try:
        whole = rows.to_pylist()
    except (ValueError, OverflowError):
        columns = [(name, _values(column)) for name, column in zip(rows.schema.names, rows.columns, strict=True)]
        for index in range(rows.num_rows):
            row = {name: values[index] for name, values in columns}
            refused = [name for name, value in row.items() if isinstance(value, Refused)]
            if needed := [name for name in refused if wanted is None or name in wanted]:
                yield Refused(f"column {needed[0]!r} cannot be read: {row[needed[0]]}")
            else:
                yield {name: value for name, value in row.items() if name not in refused}
    else:
        yield from whole


def _values(column: Any) -> list[Any]:
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError):
        return [_value(value) for value in column]


def _value(value: Any) -> Any:
    try:
        return value.as_py()
    except (ValueError, OverflowError) as error:
        return Refused(first_line(error))


def _features(schema: Any) -> Any:
    """What `datasets` wrote of the columns, but for media; None where it wrote nothing, or nothing to be decoded."""
    if b"huggingface" not in (schema.metadata or {}) or b'"Json"' not in schema.metadata[b"huggingface"]:
        return None
    import datasets

    try:
        found = datasets.Features.from_arrow_schema(schema)
    except Exception as error:  # a feature that this version of datasets does not know
        raise InputError(
            f"a column is of a kind that datasets {datasets.__version__} here does not know ({first_line(error)}); "
            "save the rows as JSON lines"
        ) from error
    return datasets.Features({name: kind for name, kind in found.items() if type(kind).__name__ not in MEDIA})


def _decode(row: dict[str, Any], features: Any) -> dict[str, Any] | Refused:
    """JSON that is kept as text, which is how `datasets` stores messages that are not all alike, as what it says."""
    if features is None:
        return row
    known = {name: value for name, value in row.items() if name in features}
    kinds = type(features)({name: features[name] for name in known})
    try:
        return {**row, **kinds.decode_example(known)}
    except (ValueError, OverflowError) as error:
        return Refused(f"a column of JSON holds what is none: {first_line(error)}")


def _without_nulls(value: Any) -> Any:
    """The value without the keys that Arrow gives every object of a column, however deep, because one has them."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in without_nulls(value).items()}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
