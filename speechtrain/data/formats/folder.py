"""Reader of a folder of recordings as a corpus."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from speechtrain.data.formats.manifests import (
    AS_TABLE,
    MOST_TEXT_BYTES,
    Manifest,
    Record,
    digest,
    measure,
    simple_cut,
)
from speechtrain.data.recordings import header_or_none
from speechtrain.errors import DataError

AUDIO_SUFFIXES = (
    *(".wav", ".wave", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".sph", ".aiff", ".aif", ".aifc"),
    *(".au", ".snd", ".caf", ".w64", ".rf64"),
)
"""The suffixes of recordings. A file with another suffix is opened to find out if it is a recording."""

# The suffixes of recordings that libsndfile does not read
_OTHER_SUFFIXES = (".m4a", ".mp4", ".aac", ".wma", ".amr", ".3gp", ".webm", ".mov", ".mkv")
ANNOTATIONS = {
    ".eaf": "ELAN",
    ".textgrid": "Praat",
    ".srt": "captions",
    ".vtt": "captions",
    ".ctm": "NIST",
    ".stm": "NIST",
}
"""The suffixes of annotations, which are not read, with their formats."""
# Files with these suffixes are never opened as recordings. To open one takes 0.4 ms.
_NO_AUDIO_SUFFIXES = (
    *(".txt", ".csv", ".tsv", ".json", ".jsonl", ".xml", ".html", ".yaml", ".yml", ".md", ".pdf"),
    *(".lab", ".trn", ".text", ".png", ".jpg", *ANNOTATIONS),
    *(".npy", ".npz", ".pt", ".h5", ".ark", ".scp", ".tar", ".gz", ".zip", ".py", ".sh", ".log"),
)
# The most bytes of a *.trans.txt: about 300,000 transcripts. The largest one of LibriSpeech has 0.03 MB.
_MAX_LIST_BYTES = 2**25
_LIST_SUFFIX = ".trans.txt"
_LAYOUTS = 4  # the number of layouts that are read. It is in the fingerprint, so a new one needs a new index.
_LONGEST_WORD = 3.0  # seconds. Most recordings of commands have one second.
_PARTS = ("train", "dev", "test", "valid", "validation", "val", "eval")  # names of the parts of a corpus
_MAX_VISITS = 100  # the most times that one folder is read if several links lead to it


class Folder(Manifest):
    """Every recording below a folder, in three layouts that may be mixed:

    - ``x.wav`` (or another file that libsndfile reads) with its transcript in ``x.txt`` next to it.
    - A folder ``wav`` with a folder ``txt`` next to it: ``wav/x.wav`` and ``txt/x.txt``.
    - As in LibriSpeech: each line of ``*.trans.txt`` is an id, a space and the transcript of ``<id>.flac`` in
      the same folder. An id begins with the speaker.

    If no recording has a transcript, and the folders below this one seem to have the names of words, the name
    of a folder is the transcript of the recordings in it (see ``_words``).

    A recording without a transcript file has an empty transcript. The id of a cut is the path of the
    recording without suffix, from the folder's name on. The length of a recording is read from its header. A
    recording with a damaged header is a cut, too, so that it is reported like other damaged recordings.
    """

    kind = "folder"

    def fingerprint(self) -> str:
        """Return a hash of every file's path, size and modification time."""
        return digest(self.kind, _LAYOUTS, str(self.path), self._files)

    def warnings(self) -> Iterator[str]:
        omissions = []
        undecodable = [name for name in self._unused if name.lower().endswith(_OTHER_SUFFIXES)]
        if undecodable:
            name = undecodable[0]
            command = f"ffmpeg -i {shlex.quote(name)} {shlex.quote(os.path.splitext(name)[0] + '.wav')}"
            omissions.append(
                f"{_kinds(undecodable)} (cannot be decoded: convert to WAV or FLAC, as with {command})"
            )
        omissions += self._other_omissions()
        if omissions:
            yield f"{self.path}: left out: {', '.join(omissions)}"
        if self._words:
            names = f"the names of {len(self._words)} folders are used as words, such as {min(self._words)!r}"
            setting = f"{{path: {self.path}, text: ''}}"
            yield f"{self.path}: no transcripts, so {names}. To read none: {setting}"

    def _other_omissions(self) -> Iterator[str]:
        """Yield the numbers of the files that are left out and have no suffix of a recording."""
        copies = sorted(self._audio - set(self._recordings.values()))
        if copies:
            yield f"{_kinds(copies)} of the name of another recording"
        used_texts = {self._text_name(stem) for stem in self._recordings}
        texts = [
            name for name in set(self._text_files.values()) - used_texts if not name.endswith(_LIST_SUFFIX)
        ]
        if texts:
            yield f"{len(texts)} .txt without a recording"
        unknown_files = [name for name in self._unused if not name.lower().endswith(_OTHER_SUFFIXES)]
        if unknown_files:
            yield f"{_kinds(unknown_files)} that are no recordings"
        if self._annotations:
            yield self._annotations

    @cached_property
    def _annotations(self) -> str:
        """The number of annotations and tables, if a recording has no transcript, otherwise ""."""
        names = [name for name in self._names if name.lower().endswith((*ANNOTATIONS, ".csv", ".tsv"))]
        if not names or self._words:
            return ""
        transcribed = {*filter(self._text_name, self._recordings), *self._librispeech_utterances()}
        untranscribed = self._recordings.keys() - transcribed
        if not untranscribed:
            return ""
        formats = {ANNOTATIONS.get(os.path.splitext(name)[1].lower(), "table") for name in names}
        fact = f"{_kinds(names)} ({', '.join(sorted(formats))}) beside {len(untranscribed)} recordings"
        return f"{fact} without a transcript: {AS_TABLE}"

    def text_hint(self) -> str:
        if self._annotations:
            return self._annotations
        recordings = f"{len(self._recordings)} recordings, for example"
        other_files = {Path(name).stem: name for name in self._names if name not in self._audio}
        untranscribed = []
        for stem, recording in sorted(self._recordings.items()):
            text_name = self._text_name(stem)
            if text_name is None:
                untranscribed.append(stem)
            elif not any(map(str.isalnum, self._text(stem))):
                fact = "has no words" if self._text(stem) else "is empty"
                return f"{recordings} {recording}; {text_name} {fact}"
        if not untranscribed:
            return ""
        # The example is the first recording with another file of the same name, if there is one.
        example = untranscribed[0]
        for stem in untranscribed:
            if os.path.basename(stem) in other_files:
                example = stem
                break
        hint = f"{recordings} {self._recordings[example]}; no {example}.txt"
        namesake = other_files.get(os.path.basename(example))
        return f"{hint}, but {namesake} has its name" if namesake else hint

    @cached_property
    def _names(self) -> list[str]:
        """The path below the folder of each file that is not hidden, sorted."""
        return files_below(self.path, ("",))

    @cached_property
    def _audio(self) -> set[str]:
        """The paths of the files that are recordings, by their suffixes or by their contents."""
        recordings = set()
        for name in self._names:
            suffix = os.path.splitext(name)[1].lower()
            is_recording = suffix in AUDIO_SUFFIXES
            if not is_recording and suffix not in _NO_AUDIO_SUFFIXES:
                is_recording = header_or_none(str(self.path / name)) is not None
            if is_recording:
                recordings.add(name)
        return recordings

    @cached_property
    def _unused(self) -> list[str]:
        """The paths of other files that may be recordings, unless a recording has the name of the file."""
        unused = []
        for name in self._names:
            is_known = name in self._audio or name.lower().endswith(_NO_AUDIO_SUFFIXES)
            if not is_known and os.path.splitext(name)[0] not in self._recordings:
                unused.append(name)
        return unused

    @cached_property
    def _files(self) -> list[tuple[str, int, int]]:
        """The (path below the folder, size, modification time in ns) of audio and text files, sorted."""
        files = []
        for name in sorted({*self._audio, *self._text_files.values()}):
            try:
                status = os.stat(self.path / name)
                files.append((name, status.st_size, status.st_mtime_ns))
            except OSError:  # A broken link counts as a recording that is missing.
                files.append((name, -1, -1))
        return files

    @cached_property
    def _recordings(self) -> dict[str, str]:
        """The path of each recording by its stem, which is the path without suffix.

        If recordings differ only in their AUDIO_SUFFIXES, the first path in alphabetical order is used. Other
        suffixes may be numbers, so they belong to the stem if several recordings differ in them.
        """
        counts = Counter(os.path.splitext(name)[0] for name in self._audio)
        recordings = dict[str, str]()
        for name in sorted(self._audio, reverse=True):
            stem, suffix = os.path.splitext(name)
            is_whole_stem = suffix.lower() not in AUDIO_SUFFIXES and counts[stem] > 1
            recordings[name if is_whole_stem else stem] = name
        return recordings

    @cached_property
    def _text_files(self) -> Mapping[str, str]:
        """The path of each text file, by this path and by this path in lower case.

        The second key finds B.TXT for b.wav.
        """
        text_files = dict[str, str]()
        for name in self._names:
            if name.lower().endswith(".txt"):
                text_files[name.lower()] = name
                text_files[name] = name
        return text_files

    @cached_property
    def _words(self) -> Collection[str]:
        """The folders whose names are the transcripts of their recordings.

        There are none if a recording has a transcript, or is not directly in such a folder. The folders must
        not be speakers or parts of a corpus. So there are two or more, names have a letter, no digit and are
        not in _PARTS, and the first recording of each is not longer than a word. Folders such as
        ``_background_noise_`` are ignored.
        """
        first_recordings = dict[str, str]()
        for stem, name in sorted(self._recordings.items()):
            first_recordings.setdefault(os.path.dirname(stem), name)
            if self._text_name(stem):
                return ()
        if any(name.endswith(_LIST_SUFFIX) for name in self._text_files):
            return ()
        words = {folder for folder in first_recordings if not folder.startswith("_")}
        for word in words:
            has_letter, has_digit = any(map(str.isalpha, word)), any(map(str.isdigit, word))
            if not has_letter or has_digit or os.sep in word or word.lower() in _PARTS:
                return ()
            seconds, _ = measure(str(self.path / first_recordings[word]))
            if seconds > _LONGEST_WORD:
                return ()
        return words if len(words) > 1 else ()

    def _text_name(self, stem: str) -> str | None:
        """Return the path of a recording's text file, or None if it has none."""
        # The slash makes ``wav/x`` match, too.
        stem_in_txt_folder = f"/{stem}".replace("/wav/", "/txt/").removeprefix("/")
        for text_stem in (stem, stem_in_txt_folder):
            name = f"{text_stem}.txt"
            path = self._text_files.get(name) or self._text_files.get(name.lower())
            if path:
                return path
        return None

    def _text(self, stem: str) -> str:
        """Return the transcript of a recording from its text file. It is empty if the file is missing."""
        name = self._text_name(stem)
        return " ".join(self._read(name).split()) if name else ""

    def entries(self) -> Iterator[tuple[int, Record]]:
        if not self._recordings:
            left_out = " ".join(self.warnings()).removeprefix(f"{self.path}: ")
            raise DataError(f"{self.path} contains no recordings. {left_out or 'It has no audio files'}")
        utterances = self._librispeech_utterances()
        # A listed utterance without a recording is a cut whose file is missing.
        stems = sorted({*self._recordings, *utterances})
        for number, stem in enumerate(stems, 1):
            name = self._recordings.get(stem, f"{stem}.flac")
            text, speaker = utterances.get(stem, (None, None))
            if text is None:
                folder = os.path.dirname(stem)
                text = folder if folder in self._words else self._text(stem)
            path = str(self.path / name)
            seconds, rate = measure(path)
            cut = simple_cut(f"{self.name}/{stem}", path, 0.0, seconds, text, rate=rate, speaker=speaker)
            yield number, cut

    def _librispeech_utterances(self) -> dict[str, tuple[str, str | None]]:
        """Return the transcript and the speaker of each utterance in LibriSpeech's lists, by its stem.

        A list has the name SPEAKER-CHAPTER.trans.txt. The speaker is None unless the ids in a list begin with
        the name of the list.
        """
        utterances = {}
        for name in sorted(set(self._text_files.values())):
            if not name.endswith(_LIST_SUFFIX):
                continue
            folder, list_name = os.path.split(name.removesuffix(_LIST_SUFFIX))
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


class AudioFolder(Folder):
    """A folder of recordings, of which no transcript is read."""

    kind = "audio-folder"
    _text_files = MappingProxyType[str, str]({})
    _words = ()

    def _other_omissions(self) -> Iterator[str]:
        return iter(())


def _kinds(names: Iterable[str]) -> str:
    """Return the number of files of each suffix, the most frequent first, as in ``3 .m4a, 1 .webm``."""
    counts = Counter(os.path.splitext(name)[1].lower() or "without a suffix" for name in names)
    return ", ".join(f"{count} {suffix}" for suffix, count in counts.most_common())


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
