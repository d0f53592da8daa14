"""Reader of a folder of recordings as a corpus."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from speechtrain.data.formats.manifests import (
    MOST_TEXT_BYTES,
    Entry,
    Manifest,
    digest,
    measure,
    simple_cut,
)
from speechtrain.errors import DataError

AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".sph", ".aiff", ".aif")
"""The suffixes of the recordings that are read."""

# the suffixes of recordings that are not read, which a warning lists
_OTHER_SUFFIXES = (".m4a", ".mp4", ".aac", ".wma", ".amr", ".3gp", ".webm", ".caf", ".au", ".mov", ".mkv")
# The most bytes of a *.trans.txt: about 300,000 transcripts. The largest one of LibriSpeech has 0.03 MB.
_MAX_LIST_BYTES = 2**25
_LAYOUTS = 3  # the number of layouts that are read. It is in the fingerprint, so a new one needs a new index.
_MAX_VISITS = 100  # the most times that one folder is read if several links lead to it


class Folder(Manifest):
    """Every recording below a folder, in three layouts that may be mixed:

    - ``x.wav`` (or flac, ogg, opus, mp3, sph, aiff) with its transcript in ``x.txt`` next to it.
    - A folder ``wav`` with a folder ``txt`` next to it: ``wav/x.wav`` and ``txt/x.txt``.
    - As in LibriSpeech: each line of ``*.trans.txt`` is an id, a space and the transcript of ``<id>.flac`` in
      the same folder. An id begins with the speaker.

    A recording without a transcript file has an empty transcript. The id of a cut is the path of the
    recording without suffix, from the folder's name on. The length of a recording is read from its header. A
    recording with a damaged header is a cut, too, so that it is reported like other damaged recordings.
    """

    kind = "folder"

    def fingerprint(self) -> str:
        """Return a hash of every file's path, size and modification time."""
        return digest(self.kind, _LAYOUTS, str(self.path), self._files)

    def warnings(self) -> Iterator[str]:
        names = []
        for name in files_below(self.path, _OTHER_SUFFIXES):
            if os.path.splitext(name)[0] not in self._recordings:
                names.append(name)
        if names:
            suffixes = ", ".join(AUDIO_SUFFIXES)
            yield f"{self.path}: {len(names)} files are not read, such as {names[0]}. Convert to {suffixes}"

    def text_hint(self) -> str:
        other_files = {}  # the files that are not recordings, by their names without folder and suffix
        for name in files_below(self.path, ("",)):
            if not name.lower().endswith(AUDIO_SUFFIXES):
                other_files[Path(name).stem] = name
        stems = sorted(self._recordings)
        # The example is the first recording with such a file of the same name, if there is one.
        example = stems[0]
        for stem in stems:
            if os.path.basename(stem) in other_files:
                example = stem
                break
        hint = f"{len(stems)} recordings, for example {self._recordings[example]}; no {example}.txt"
        namesake = other_files.get(os.path.basename(example))
        return f"{hint}, but {namesake} has its name" if namesake else hint

    @cached_property
    def _files(self) -> list[tuple[str, int, int]]:
        """The (path below the folder, size, modification time in ns) of audio and text files, sorted."""
        files = []
        for name in files_below(self.path, (*AUDIO_SUFFIXES, ".txt")):
            try:
                status = os.stat(self.path / name)
                files.append((name, status.st_size, status.st_mtime_ns))
            except OSError:  # A broken link counts as a recording that is missing.
                files.append((name, -1, -1))
        return files

    @cached_property
    def _recordings(self) -> dict[str, str]:
        """The path of each recording by its stem, which is the path without suffix.

        If recordings differ only in their suffixes, the first path in alphabetical order is used.
        """
        recordings = dict[str, str]()
        for name, _, _ in reversed(self._files):
            stem, suffix = os.path.splitext(name)
            if suffix.lower() != ".txt":
                recordings[stem] = name
        return recordings

    @cached_property
    def _text_files(self) -> dict[str, str]:
        """The path of each text file, by this path and by this path in lower case.

        The second key finds B.TXT for b.wav.
        """
        text_files = dict[str, str]()
        for name, _, _ in self._files:
            if name.lower().endswith(".txt"):
                text_files[name.lower()] = name
                text_files[name] = name
        return text_files

    def _text(self, stem: str) -> str:
        """Return the transcript of a recording from its text file. It is empty if the file is missing."""
        # The slash makes ``wav/x`` match, too.
        stem_in_txt_folder = f"/{stem}".replace("/wav/", "/txt/").removeprefix("/")
        for text_stem in (stem, stem_in_txt_folder):
            name = f"{text_stem}.txt"
            path = self._text_files.get(name) or self._text_files.get(name.lower())
            if path:
                return " ".join(self._read(path).split())
        return ""

    def entries(self) -> Iterator[Entry]:
        if not self._recordings:
            raise DataError(f"{self.path} contains no recordings ({', '.join(AUDIO_SUFFIXES)})")
        utterances = self._librispeech_utterances()
        # A listed utterance without a recording is a cut whose file is missing.
        stems = sorted({*self._recordings, *utterances})
        for number, stem in enumerate(stems, 1):
            name = self._recordings.get(stem, f"{stem}.flac")
            text, speaker = utterances.get(stem, (None, None))
            if text is None:
                text = self._text(stem)
            path = str(self.path / name)
            seconds, rate = measure(path)
            cut = simple_cut(f"{self.name}/{stem}", path, 0.0, seconds, text, rate=rate, speaker=speaker)
            yield Entry(cut, number, -1)

    def _librispeech_utterances(self) -> dict[str, tuple[str, str | None]]:
        """Return the transcript and the speaker of each utterance in LibriSpeech's lists, by its stem.

        A list has the name SPEAKER-CHAPTER.trans.txt. The speaker is None unless the ids in a list begin with
        the name of the list.
        """
        utterances = {}
        for name, _, _ in self._files:
            if not name.endswith(".trans.txt"):
                continue
            folder, list_name = os.path.split(name.removesuffix(".trans.txt"))
            for line in self._read(name, _MAX_LIST_BYTES).splitlines():
                utterance_id, _, text = line.strip().partition(" ")
                if not utterance_id:
                    continue
                has_speaker = "-" in list_name and utterance_id.startswith(f"{list_name}-")
                speaker = list_name.partition("-")[0] if has_speaker else None
                utterances[os.path.join(folder, utterance_id)] = " ".join(text.split()), speaker
        return utterances

    def _read(self, name: str, max_bytes: int = MOST_TEXT_BYTES) -> str:
        """Return the text of a file, whose path is relative to the folder. Raises DataError."""
        try:
            return self.read_transcript(self.path / name, max_bytes)
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path / name}: cannot be read as UTF-8 text ({error})") from None


def files_below(folder: Path, suffixes: tuple[str, ...]) -> list[str]:
    """Return the paths of the files with these suffixes below ``folder``, relative to it and sorted.

    Hidden files and hidden folders are left out. Raises DataError for a folder that cannot be read.
    """
    paths = []
    for parent, names in _walk(folder):
        for name in names:
            if name.lower().endswith(suffixes) and not name.startswith("."):
                paths.append(os.path.relpath(os.path.join(parent, name), folder))
    return sorted(paths)


def _walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder that is not hidden, with the names of its files. Links are followed.

    Links may lead back to a folder above them, or double the number of paths at each level. So a folder is
    not read below itself, and at most ``_MAX_VISITS`` times.
    """

    def raise_data_error(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}") from None

    # The device and inode of each folder and of all folders above it, by the path of the folder.
    chains: dict[str, tuple[tuple[int, int], ...]] = {}
    visits: Counter[tuple[int, int]] = Counter()  # by device and inode
    for parent, subfolders, names in os.walk(folder, onerror=raise_data_error, followlinks=True):
        status = os.stat(parent)
        identity = (status.st_dev, status.st_ino)
        ancestors = chains.get(os.path.dirname(parent), ())
        chains[parent] = (*ancestors, identity)
        visits[identity] += 1
        # os.walk reads the folders that remain in ``subfolders``.
        if identity in ancestors or visits[identity] > _MAX_VISITS:
            subfolders.clear()
            continue
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        yield parent, names
