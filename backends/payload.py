"""The payload: the code that goes to a host and runs there, named by its content.

<payload>/host/backends/          the agent and what runs things
<payload>/engine/capture/         the tap and whatever reads tensors; with its entry point, SGLang's PYTHONPATH
<payload>/embedded/               the CPU engine's platform plugin
"""

from __future__ import annotations

import io
import zipfile
from importlib import resources
from importlib.resources.abc import Traversable

from backends import bootstrap

ENTRY_POINTS = {
    "engine/layertap_tap": "[sglang.srt.plugins]\nlayertap = capture.tap.plugin:register\n",
    "embedded/layertap_cpu": (
        "[sglang.srt.platforms]\nlayertap_cpu = layertap_cpu:activate\n\n"
        "[sglang.srt.plugins]\nlayertap_cpu = layertap_cpu:register\n"
    ),
}


def files() -> dict[str, bytes]:
    """Every file of the payload by its path in it."""
    found = {
        **_tree(resources.files("backends"), "host/backends"),
        **_tree(resources.files("capture"), "engine/capture"),
        **_tree(resources.files("backends") / "embedded" / "engine", "embedded"),
    }
    for place, text in ENTRY_POINTS.items():
        name = place.rpartition("/")[2]
        found[f"{place}-0.dist-info/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n".encode()
        found[f"{place}-0.dist-info/entry_points.txt"] = text.encode()
    return found


def pack() -> tuple[str, bytes]:
    """The payload as a zip archive, the same bytes for the same code, and the hash that names it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:  # stored: what deflate makes of it differs by version
        for path, data in sorted(files().items()):
            archive.writestr(zipfile.ZipInfo(path, date_time=(2026, 1, 1, 0, 0, 0)), data)
    data = stream.getvalue()
    return bootstrap.name_of(data), data


def _tree(folder: Traversable, prefix: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            if entry.name != "__pycache__":
                found |= _tree(entry, f"{prefix}/{entry.name}")
        elif not entry.name.endswith(".pyc"):
            found[f"{prefix}/{entry.name}"] = entry.read_bytes()
    return found
