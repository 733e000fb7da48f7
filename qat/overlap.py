"""Decontamination: passages of calibration and training text that evaluation text or a task has too are cut out.

As in GPT-3's appendix C (Brown et al. 2020): two texts overlap where they share `n` words in a row, 13 by default; such
a passage is removed with MARGIN characters on either side, and what remains between two of them is dropped when it is
shorter than MARGIN. Words are runs of letters, digits and marks, in lower case, so that spacing, punctuation and the
tokenizer do not matter; an ideograph or kana is a word by itself. n-grams are compared by hashes of 64 bits: of 10^8
n-grams of a text and 10^6 of evaluation text, one pair in some 10^5 texts agrees by chance.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qat.report import plural

MARGIN = 200  # characters
SAME_TEXT = 0.5  # share of the evaluation text's n-grams from which on a text holds it, rather than quotes it
POINTS = 0x30000  # code points with entries in the tables; there are no letters of living scripts above
LONGEST = 256  # letters of a word after which their weights repeat
TABLE_BITS = 22
Hashes = NDArray[np.uint64]
Places = NDArray[np.int64]
ALONE = ((0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, POINTS - 1))


def _mix(x: Hashes) -> Hashes:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@cache
def _tables() -> tuple[NDArray[np.uint8], Hashes, Hashes]:
    """By code point: 0 between words, 1 in a word, 2 a word by itself; a hash of its lower case. Weights by place."""
    kind, lower = np.zeros(POINTS, np.uint8), np.arange(POINTS, dtype=np.uint64)
    for point in range(POINTS):
        letter = chr(point)
        if unicodedata.category(letter)[0] in "LNM":
            kind[point] = 1
            if len(small := letter.lower()) == 1:
                lower[point] = ord(small)
    for first, last in ALONE:
        kind[first : last + 1] *= 2
    with np.errstate(over="ignore"):
        weights: Hashes = np.cumprod(np.full(LONGEST, 0x9E3779B97F4A7C15, np.uint64), dtype=np.uint64)
    return kind, _mix(lower + np.uint64(1)), weights


def ngrams(text: str, n: int) -> tuple[Hashes, Places, Places]:
    """Hash, first character and end of every `n` words in a row: three arrays (words - n + 1,)."""
    kind, letters, weights = _tables()
    points = np.minimum(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32), POINTS - 1)
    kinds = kind[points]
    before = np.concatenate([np.zeros(1, np.uint8), kinds[:-1]])
    at = np.flatnonzero(kinds)  # letters
    first = np.flatnonzero(((before != 1) | (kinds == 2))[at])  # the first letter of each word, among the letters
    count = len(first) - n + 1
    if count < 1:
        return np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64)
    lengths = np.diff(first, append=len(at))
    place = (np.arange(len(at)) - np.repeat(first, lengths)) % LONGEST
    words = _mix(np.add.reduceat(letters[points[at]] * weights[place], first))
    hashes = np.zeros(count, np.uint64)
    for k in range(n):
        hashes = hashes * weights[0] + words[k : k + count]
    ends = at[first + lengths - 1] + 1
    return _mix(hashes), at[first[:count]], ends[n - 1 :]


class HeldOut:
    """The n-grams of texts that nothing may be learned from. texts: by name, such as `data.evaluation.source a.txt`."""

    def __init__(self, texts: Mapping[str, Iterable[str]], n: int) -> None:
        self.n = n
        found = {name: [ngrams(text, n)[0] for text in parts] for name, parts in texts.items()}
        empty = np.empty(0, np.uint64)
        self.of = {name: np.unique(np.concatenate([empty, *parts])) for name, parts in found.items()}
        self.hashes = np.unique(np.concatenate([empty, *self.of.values()]))
        self._table = np.zeros(2**TABLE_BITS, bool)  # most hashes of other texts end here
        self._table[self._short(self.hashes)] = True

    def _short(self, hashes: Hashes) -> NDArray[np.intp]:
        return (hashes >> np.uint64(64 - TABLE_BITS)).astype(np.intp)

    def find(self, hashes: Hashes) -> tuple[Places, Places]:
        """Which of `hashes` are held out, and which of the held-out ones they are."""
        maybe = np.flatnonzero(self._table[self._short(hashes)])
        place = np.searchsorted(self.hashes, hashes[maybe])
        same = self.hashes[place % max(1, len(self.hashes))] == hashes[maybe] if len(maybe) else np.empty(0, bool)
        return maybe[same], place[same]


class Cutter:
    """Cuts what is held out from the pieces of one text, and counts."""

    def __init__(self, held_out: HeldOut) -> None:
        self.held_out = held_out
        self._seen = np.zeros(len(held_out.hashes), bool)
        self.read = self.cut = self.pieces = self.passages = 0

    def __call__(self, text: str) -> list[str]:
        """What remains of a piece: `[text]` when nothing of it is held out."""
        self.read += len(text)
        hashes, starts, ends = ngrams(text, self.held_out.n)
        where, which = self.held_out.find(hashes)
        if not len(where):
            return [text]
        self._seen[which] = True
        low, high = np.maximum(starts[where] - MARGIN, 0), ends[where] + MARGIN  # both rise
        new = np.concatenate([np.ones(1, bool), low[1:] > high[:-1]])
        bounds = zip([0, *high[np.append(new[1:], True)]], [*low[new], len(text)], strict=True)
        kept = [part for start, end in bounds if len(part := text[start:end]) >= MARGIN]
        self.pieces += 1
        self.passages += int(new.sum())
        self.cut += len(text) - sum(map(len, kept))
        return kept

    def share(self, name: str) -> float:
        """The share of the n-grams of the held-out text `name` that were found in this one."""
        own = self.held_out.of[name]
        return float(self._seen[np.searchsorted(self.held_out.hashes, own)].mean()) if len(own) else 0.0

    def counts(self) -> dict[str, Any]:
        """words: n. read, cut: characters. texts: those, or pieces of long ones, that had passages. found: shares."""
        return {
            "words": self.held_out.n,
            "read": self.read,
            "cut": self.cut,
            "passages": self.passages,
            "texts": self.pieces,
            "found": {name: self.share(name) for name in self.held_out.of},
        }


def sentence(counts: Mapping[str, Any]) -> str:
    """What `Cutter.counts` says, for a report."""
    if not counts["passages"]:
        return f"{counts['read']:,} characters; no {counts['words']} words in a row of evaluation text or tasks"
    share = counts["cut"] / counts["read"]
    return (
        f"{counts['read']:,} characters; cut out: {plural(counts['passages'], 'passage')} in "
        f"{plural(counts['texts'], 'text')}, {plural(counts['cut'], 'character')} ({share:.2%}), of which evaluation "
        f"text or a task has {counts['words']} words in a row"
    )
