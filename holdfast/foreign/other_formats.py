"""What is next to a checkpoint, or in its place, and is not read: named, with what to do about it.

Formats of other programs are recognised by names and first bytes, to refuse them by name. Files and
folders next to those that a format reads are listed, so that a part never looks like all of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.errors import some_of
from holdfast.foreign.location import Location, why_none
from holdfast.foreign.shared_opening import folders_in

_MAX_FOLDERS = 100
"""So many folders in a folder are examined."""
_MAX_HEADS = 100
_HEAD_NBYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Other:
    """A format that is not read.

    Args:
        title: As people call it.
        advice: What to do.
        names: Of a file, or of what is in a folder.
        magic: The first bytes of a file; empty if they tell nothing.
    """

    title: str
    advice: str
    names: re.Pattern[str]
    magic: bytes = b""


def _other(title: str, names: str, advice: str, magic: bytes = b"") -> _Other:
    return _Other(title=title, advice=advice, names=re.compile(names), magic=magic)


_CUT_BY_RANK = (
    _other(
        "DeepSpeed",
        r"(?:bf16_)?zero_pp_rank_\d+_mp_rank_\d+\w*\.pt|mp_rank_(?!00)\d+_model_states\.pt"
        r"|global_step\d+(?:_universal)?|latest_universal|zero_to_fp32\.py",
        "`python zero_to_fp32.py . OUT --safe_serialization`, in the folder where DeepSpeed has "
        "put this script, writes weights in OUT that are read",
    ),
    _other(
        "Megatron's format `torch`",
        r"mp_rank_\d+(?:_\d+)*",
        "load it with Megatron and save it with `--ckpt-format torch_dist`; name one "
        "model_optim_rng.pt to read this rank's file alone",
    ),
    _other(
        "Llama's model-parallel format",
        r"consolidated\.(?!00\.)\d+\.pth",
        "convert it with Transformers (convert_llama_weights_to_hf.py); name one file to read "
        "its rank's slices alone",
    ),
)
"""Those with one file for each rank."""

_OF_A_RANK = re.compile(r"consolidated\.\d+\.pth|\w*mp_rank_\d+_\w+\.pt")

_OTHERS = (
    *_CUT_BY_RANK,
    _other(
        "PyTorch DCP without its .metadata",
        r"__\d+_\d+\.distcp",
        "DCP writes .metadata last, so the save was not finished, or not all of it was copied; "
        "take an older checkpoint, or copy it again",
    ),
    _other(
        "Orbax",
        r"_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt|ocdbt\.process_\d+",
        "load it with Orbax and save the arrays with safetensors.flax.save_file",
    ),
    _other(
        "T5X",
        r"target\..+|state\.param_states\..+",
        "load it with T5X and save the arrays with safetensors.flax.save_file",
    ),
    _other(
        "Flax",
        r".+\.msgpack",
        "load it with flax.serialization.msgpack_restore and save it with "
        "safetensors.flax.save_file",
    ),
    _other(
        "TensorFlow",
        r"saved_model\.pb(?:txt)?|.+\.data-\d+-of-\d+",
        "load it with TensorFlow and save the variables with safetensors.tensorflow.save_file",
    ),
    _other(
        "HDF5 or Keras",
        r".+\.(?:h5|hdf5|keras)",
        "load it with its program and save the weights with safetensors",
        b"\x89HDF\r\n\x1a\n",
    ),
    _other(
        "GGUF",
        r".+\.gguf",
        "load it with Transformers (`from_pretrained(…, gguf_file=…)`) and save it with "
        "`save_pretrained`; what was quantized stays rounded",
        b"GGUF",
    ),
    _other("ONNX", r".+\.onnx", "save the weights of the model that it was made from"),
    _other(
        "NumPy",
        r".+\.np[yz]",
        "load it with numpy.load and save the arrays with safetensors.numpy.save_file",
        b"\x93NUMPY",
    ),
    _other(
        "NeMo's archive",
        r".+\.nemo",
        "unpack it (`tar -xf`) and name the model_weights in it",
    ),
    _other(
        "an archive",
        r".+\.(?:tar|tar\.gz|tgz|tar\.bz2|tar\.xz|tar\.zst|zip|7z|gz|zst)",
        "unpack it, and name what was packed",
    ),
)
"""In the order in which they are tried."""

STATE_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".tar", ".distcp"),
    *(".npz", ".npy", ".h5", ".hdf5", ".keras", ".msgpack", ".gguf", ".onnx", ".nemo"),
)
"""How the names of files end that have the state of a model, or a part of it."""

_PROGRESS = {"trainer_state.json": "the Trainer's step, epoch and log, not read"}
"""What has state under the suffix of a configuration."""


def refuse_by_name(location: Location, known_below: Callable[[Location], str]) -> str:
    """Return the message for a place that is not read; empty if nothing is known about it.

    Args:
        location: A file or a folder.
        known_below: Returns the title of the format of a folder; empty if it has none.
    """
    names = location.names() if location.file is None else [location.file]
    for name in names:
        is_weights = name.endswith((".safetensors", ".bin", ".pt", ".pth"))
        if is_weights and (why := why_none(location, name)):
            return f"{location.storage.describe(name)} is not a checkpoint{why}"
    if location.file is not None:
        return _refused_file(location, location.file)
    result = _find(location, [*dict.fromkeys([*names, *folders_in(location.storage)])])
    if result is not None and not _is_read(location, *result, known_below):
        other, name = result
        return f"{location.label} has {name} ({other.title}), which is not read: {other.advice}"
    below = [
        f"{name} ({known})"
        for name, folder in _folders(location)
        if (known := known_below(folder) or _title_of(folder))
    ]
    if below:
        return f"{location.label} is not a checkpoint, but holds some: name {some_of(below)}"
    return ""


def _is_read(
    location: Location, other: _Other, name: str, known_below: Callable[[Location], str]
) -> bool:
    """Return True for the folder of a step that is read, though its run does not name it."""
    inner = location.inside(name)
    return inner is not None and known_below(inner).startswith(other.title)


def is_cut_by_rank(location: Location) -> bool:
    """Return True for a folder of files of `torch.save` that each have what one rank held.

    Read as parts, each of them would look like a whole model.
    """
    return location.file is None and _has_cut(location.names())


def _has_cut(names: Sequence[str]) -> bool:
    files = [name for name in names if name.endswith((".pt", ".pth"))]
    return any(other.names.fullmatch(name) for other in _CUT_BY_RANK for name in files)


def note_on_ranks(location: Location, name: str) -> list[str]:
    """Return a sentence for a file that has what one of several ranks held, by its name."""
    if _OF_A_RANK.fullmatch(name) and _has_cut(location.storage.list("")):
        return [f"{name} has what one rank held, by its name: the others are not read"]
    return []


def unread_files(location: Location, own: Sequence[str]) -> list[str]:
    """Say which files of a folder may hold state, too, and are not read with it.

    Args:
        location: The folder.
        own: How names end that the format itself reads, or says something about.
    """
    notes = []
    for name in location.names():
        if name.endswith(STATE_SUFFIXES) and not name.endswith(tuple(own)):
            other = next((each for each in _OTHERS if each.names.fullmatch(name)), None)
            what = "name this file to read it" if other is None else f"{other.title}, not read"
            notes.append(f"{name}: {what}")
        elif name in _PROGRESS:
            notes.append(f"{name}: {_PROGRESS[name]}")
    return notes


def unread_folders(location: Location, known_below: Callable[[Location], str]) -> list[str]:
    """Say which folders in a folder have checkpoints. Arguments: `refuse_by_name`."""
    notes = []
    for name, folder in _folders(location):
        if known := known_below(folder):
            notes.append(f"{name}/: a folder with {known}; name it to read it")
        elif other := _title_of(folder):
            notes.append(f"{name}/: a folder with {other}, not read")
    if more := _folder_names(location)[_MAX_FOLDERS:]:
        notes.append(f"{len(more)} more folders, such as {more[0]}/: what is in them is not known")
    return notes


def _folders(location: Location) -> list[tuple[str, Location]]:
    """Return the folders in a folder that may be checkpoints."""
    names = _folder_names(location)[:_MAX_FOLDERS]
    inside = [(name, location.inside(name)) for name in names]
    return [(name, folder) for name, folder in inside if folder is not None]


def _folder_names(location: Location) -> list[str]:
    return [name for name in folders_in(location.storage) if not name.startswith((".", "__"))]


def _refused_file(location: Location, name: str) -> str:
    """Return the message for one file."""
    head = location.head(name, _HEAD_NBYTES)
    place = location.storage.describe(name)
    others = [other for other in _OTHERS if other.magic and head.startswith(other.magic)]
    others += [other for other in _OTHERS if other.names.fullmatch(name)]
    if others:
        return f"{place} ({others[0].title}) is not read: {others[0].advice}"
    if not any(head) and name.endswith(STATE_SUFFIXES):
        what = "starts with zeros" if head else "is empty"
        return (
            f"{place} is not a checkpoint: it {what}; damaged, as after a crash or on a full disk"
        )
    return ""


def _find(location: Location, names: Sequence[str]) -> tuple[_Other, str] | None:
    """Return the format of a folder by what is in it, and a name that tells."""
    for other in _OTHERS:
        for name in names:
            if other.names.fullmatch(name):
                return other, name
    magics = {other.magic: other for other in _OTHERS if other.magic}
    for name in names[:_MAX_HEADS]:
        head = location.head(name, _HEAD_NBYTES)
        for magic, other in magics.items():
            if head.startswith(magic):
                return other, name
    return None


def _title_of(location: Location) -> str:
    result = _find(location, location.names())
    return "" if result is None else result[0].title
