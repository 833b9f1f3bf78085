"""The files of a folder, local or remote, in an order that no file system decides."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

import tensorflow as tf

from tf_largebatch.core.errors import DataError


class FolderListing(NamedTuple):
    """What lies below a folder: paths relative to it, sorted, and what is wrong with others."""

    files: list[bytes]
    problems: list[str]


def list_root(
    directory: str, *, suffixes: tuple[str, ...], is_remote: bool
) -> tuple[list[str], list[str]]:
    """The names of the folders in a directory, and those of the images, hidden ones left out.

    Raises:
        DataError: the directory cannot be listed.
    """
    try:
        if is_remote:
            _, folders, files = next(
                tf.io.gfile.walk(directory, onerror=_raise), (directory, [], [])
            )
            folders = [name.rstrip("/") for name in folders]
        else:
            with os.scandir(directory) as entries:
                kinds = [(entry.name, _is_folder(entry, suffixes)) for entry in entries]
            folders = [name for name, is_folder in kinds if is_folder]
            files = [name for name, is_folder in kinds if not is_folder]
    except (OSError, tf.errors.OpError) as error:
        raise DataError(f"{directory} cannot be listed: {error}") from error
    return (
        [name for name in folders if not name.startswith(".")],
        sorted(name for name in files if _is_image(name, suffixes)),
    )


def list_folder(folder: str, *, suffixes: tuple[str, ...], is_remote: bool) -> FolderListing:
    """The images below a folder at any depth; of local ones, the empty and unreadable apart."""
    problems: list[str] = []
    if is_remote:
        files = _remote_files(folder, suffixes, problems)
    else:
        files = _local_files(folder, "", suffixes, problems)
    return FolderListing([os.fsencode(file) for file in sorted(files)], sorted(problems))


def _is_image(name: str, suffixes: tuple[str, ...]) -> bool:
    return not name.startswith(".") and name.lower().endswith(suffixes)


def _local_files(
    folder: str, below: str, suffixes: tuple[str, ...], problems: list[str]
) -> Iterator[str]:
    try:
        with os.scandir(f"{folder}/{below}") as entries:
            for entry in entries:
                if _is_folder(entry, suffixes):
                    if not entry.name.startswith("."):
                        yield from _local_files(folder, f"{below}{entry.name}/", suffixes, problems)
                elif _is_image(entry.name, suffixes):
                    if problem := _problem_of(entry):
                        problems.append(f"{folder}/{below}{entry.name}: {problem}")
                    else:
                        yield below + entry.name
    except OSError as error:
        problems.append(f"{folder}/{below}: cannot be listed ({error.strerror})")


def _is_folder(entry: os.DirEntry[str], suffixes: tuple[str, ...]) -> bool:
    """Also what is no image and links to nothing: a folder of a disk that is not there.

    Listing it then fails, and names it; left out, it would shift the labels of the others.
    """
    links_to_nothing = entry.is_symlink() and not os.path.exists(entry.path)
    return entry.is_dir() or (links_to_nothing and not _is_image(entry.name, suffixes))


def _problem_of(entry: os.DirEntry[str]) -> str | None:
    try:
        if entry.stat().st_size == 0:
            return "is empty (0 bytes)"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if os.access(entry.path, os.R_OK) else "cannot be read (Permission denied)"


def _remote_files(folder: str, suffixes: tuple[str, ...], problems: list[str]) -> Iterator[str]:
    try:
        for place, _, names in tf.io.gfile.walk(folder, onerror=_raise):
            parts = place[len(folder) :].strip("/")
            if any(part.startswith(".") for part in parts.split("/")):
                continue
            prefix = f"{parts}/" if parts else ""
            yield from (prefix + name for name in names if _is_image(name, suffixes))
    except (OSError, tf.errors.OpError) as error:
        problems.append(f"{folder}: cannot be listed ({error})")


def _raise(error: Exception) -> None:
    raise error
