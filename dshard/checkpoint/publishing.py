"""Put a saved model in the place of the one that a folder holds: whenever a save dies, readers find one of them, whole.

Readers take `model.safetensors` where it is, else what the index names. So there is one step by which they go over from
the old model to the new one: one file takes its name, or an index takes its name, or `model.safetensors` beside a new
index goes. Names of parts that are in use are never used again, and what is not read any more is removed afterwards:
the other of the two, and the parts that the older index named. Nothing else in the folder is touched.
"""

import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dshard.checkpoint.disk import create, locked, sync_folder, write_whole
from dshard.checkpoint.file_format import parse_json, read_text
from dshard.checkpoint.model_files import INDEX_NAME, MAX_INDEX_BYTES, SINGLE_NAME, WRITER, names_in
from dshard.errors import CheckpointError

_PART = re.compile(r"model-([0-9a-f]{16}-)?\d{5}-of-\d{5}\.safetensors")
_TOKEN_BYTES = 8


def check_room(path: Path) -> None:
    """Raise a CheckpointError where a folder has the name that a file is to take."""
    if path.is_dir() and not path.is_symlink():
        raise CheckpointError(f"{path}: must be free for a file, but it is a folder. Move it, or pass another path.")


def replace_file(draft: Path, path: Path) -> None:
    """Give a whole file its name."""
    draft.rename(path)
    sync_folder(path.parent)


def replace_by_one(folder: Path, draft: Path) -> None:
    """Have a folder hold a model of one file.

    Raises:
        CheckpointError: Another save does not come to its end.
        OSError: A name cannot be had or freed; if the new model is in its place by then, it is whole.
    """
    with locked(folder):
        older = _parts_by(folder / INDEX_NAME)
        replace_file(draft, folder / SINGLE_NAME)
        (folder / INDEX_NAME).unlink(missing_ok=True)
        _remove(folder, older)


def replace_by_several(folder: Path, drafts: Mapping[str, Path], weight_map: Mapping[str, str], num_bytes: int) -> None:
    """Have a folder hold a model of several files.

    Args:
        folder: The folder.
        drafts: Whole files by the names that they should have; one that is in use gets a longer one.
        weight_map: Of these names, that of each tensor.
        num_bytes: Of all tensors.

    Raises:
        CheckpointError: Another save does not come to its end.
        OSError: A name cannot be had or freed; if the new model is in its place by then, it is whole.
    """
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    with locked(folder):
        older, names = _parts_by(index), dict[str, str]()
        try:
            for name, draft in drafts.items():
                names[name] = _longer(name) if name in older else _reserve(folder, name)
                draft.rename(folder / names[name])
            sync_folder(folder)
            said = {
                "metadata": {**WRITER, "total_size": num_bytes},
                "weight_map": {name: names[file] for name, file in sorted(weight_map.items())},
            }
            write_whole(index, (json.dumps(said, indent=2) + "\n").encode())
            if os.path.lexists(single):
                single.unlink()
                sync_folder(folder)
        except BaseException:
            _take_back(folder, set(names.values()))
            raise
        _remove(folder, older - set(names.values()))


def _reserve(folder: Path, name: str) -> str:
    """A name for a part that nobody has: its own, or one that nobody can guess."""
    try:
        with create(folder / name):
            return name
    except FileExistsError:
        return _longer(name)


def _longer(name: str) -> str:
    return name.replace("model-", f"model-{secrets.token_hex(_TOKEN_BYTES)}-", 1)


def _take_back(folder: Path, names: set[str]) -> None:
    """After an error: remove what was put there, unless it is by now what readers take."""
    with suppress(OSError):
        is_named = not names.isdisjoint(_parts_by(folder / INDEX_NAME))
        if is_named and not os.path.lexists(folder / SINGLE_NAME):
            return
        if is_named:
            (folder / INDEX_NAME).unlink()
        _remove(folder, names)


def _parts_by(index: Path) -> set[str]:
    """The parts that an index names, none where there is no index or a damaged one."""
    try:
        names = names_in(parse_json(read_text(index, MAX_INDEX_BYTES)[1]))
    except (FileNotFoundError, ValueError, CheckpointError):
        return set()
    return {name for name in names.values() if _PART.fullmatch(name)}


def _remove(folder: Path, names: set[str]) -> None:
    """Remove files or links, as far as that can be done: nobody reads them any more."""
    for name in names:
        with suppress(OSError):
            (folder / name).unlink()
