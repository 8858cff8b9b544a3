"""Pairs of a query and a document from Debian's packages, as one file of tokens.

Five sources: WordNet's words with their glosses, and its example sentences with the gloss that each
is of; packages' names and short descriptions with their long ones; English words with what
FreeDict's dictionaries say of them; names and short descriptions of manual pages with their text.

Every pair has a key, and a hash of it decides the split, so that all pairs of a key are in one:
a gloss, a source package, an English headword (in all dictionaries), a manual page. Whole families
are the `unseen` split instead: noun.food and verb.motion of WordNet, source packages with one in
the section science, Italian, and the manual's section 4 (devices).
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SOURCES = ("wordnet", "examples", "packages", "dictionary", "manual")
SPLITS = ("train", "validation", "test", "unseen")
VOCABULARY = 16_384  # token 0 is padding
QUERY_TOKENS, DOCUMENT_TOKENS = 16, 48
HELD_OUT_PER_MILLE = 12  # of the keys, for `validation` and `test` each
HEADWORDS = 50_000  # of a dictionary at most: otherwise German would be a third of all pairs
SHARED = 64  # pairs of one document at most: more share boilerplate, not a meaning
CHARACTERS = 600  # of a text that is tokenised: enough for 48 tokens

UNSEEN_FILES = (13, 38)  # lexicographer files: noun.food, verb.motion
UNSEEN_SECTION = "science"
UNSEEN_LANGUAGE = "ita"
UNSEEN_CHAPTER = "4"
LANGUAGES = {
    "bul": "bulgarian", "ces": "czech", "deu": "german", "ell": "greek", "fin": "finnish",
    "fra": "french", "hun": "hungarian", "ind": "indonesian", "ita": "italian", "jpn": "japanese",
    "nld": "dutch", "nor": "norwegian", "pol": "polish", "por": "portuguese", "rus": "russian",
    "spa": "spanish", "swe": "swedish", "tur": "turkish",
}  # fmt: skip


class Pair(NamedTuple):
    """A query and its document; source: of `SOURCES`; unseen: whether of a held-out family."""

    source: str
    key: str
    unseen: bool
    query: str
    document: str


class Texts(NamedTuple):
    """The data set: distinct texts, and pairs of them.

    Equal texts have equal indices, so all words of a synset have one document.

    queries: tokens, uint16 (queries, 16); 0 is padding.
    documents: tokens, uint16 (documents, 48); 0 is padding.
    query, document: the pairs' rows in those, int32 (n,).
    source, split: the pairs' places in `SOURCES` and `SPLITS`, uint8 (n,).
    tokenizer: the vocabulary, as JSON of the package tokenizers, uint8 (bytes,).
    """

    queries: NDArray[np.uint16]
    documents: NDArray[np.uint16]
    query: NDArray[np.int32]
    document: NDArray[np.int32]
    source: NDArray[np.uint8]
    split: NDArray[np.uint8]
    tokenizer: NDArray[np.uint8]


def split(
    arrays: Mapping[str, np.ndarray], name: str
) -> tuple[NDArray[np.uint16], NDArray[np.uint16], NDArray[np.int64]]:
    """The pairs of a split: queries (n, 16), documents (n, 48), and ids, equal for equal documents.

    They are in an order by hash, so any part of them is a fair sample of all sources.

    Args:
        arrays: of a file that `benchmarks/draw_texts.py` wrote (`numpy.load`).
        name: of `SPLITS`.
    """
    chosen = arrays["split"] == SPLITS.index(name)
    query, document = arrays["query"][chosen], arrays["document"][chosen]
    return arrays["queries"][query], arrays["documents"][document], document.astype(np.int64)


def read_pairs(files: Path, lists: Path) -> Iterator[Pair]:
    """The pairs of all sources.

    Args:
        files: of unpacked packages; it has usr/share/wordnet, /dictd and /man.
        lists: of apt; it has the files *_Packages and *_Translation-en.
    """
    share = files / "usr/share"
    for part in ("noun", "verb", "adj", "adv"):
        yield from wordnet_pairs(share / f"wordnet/data.{part}")
    yield from package_pairs(lists)
    for language in LANGUAGES:
        yield from dictionary_pairs(share / f"dictd/freedict-eng-{language}.index")
    for page in sorted(share.glob("man/man*/*.gz")):
        if not page.is_symlink():  # another name of a page
            yield from manual_pairs(page)


def make_texts(pairs: Iterable[Pair], vocabulary: int = VOCABULARY) -> Texts:
    """Tokenise pairs, without those that are equal in their first tokens, and order them by hash.

    The byte-level BPE vocabulary is of the training texts only. If a pair is in several splits, a
    held-out one keeps it; so no held-out pair is in `train`.
    """
    kept = {
        (-SPLITS.index(split_of(pair)), pair.source, _clean(pair.query), _clean(pair.document))
        for pair in pairs
    }
    rows = sorted(row for row in kept if row[2] and row[3])  # held-out first; always in this order
    texts = {text for row in rows if row[0] == 0 for text in (row[2], row[3])}
    tokenizer = train_tokenizer(sorted(texts), vocabulary)
    first = _tokens(tokenizer, [row[2] for row in rows], QUERY_TOKENS)
    second = _tokens(tokenizer, [row[3] for row in rows], DOCUMENT_TOKENS)
    chosen = np.sort(np.unique(_keys(np.hstack([first, second])), return_index=True)[1])
    _, document, pairs_of = np.unique(
        _keys(second[chosen]), return_inverse=True, return_counts=True
    )
    chosen = chosen[pairs_of[document] <= SHARED]
    chosen = chosen[np.argsort([_draw(" ".join(rows[i][1:])) for i in chosen], kind="stable")]
    queries, query = np.unique(_keys(first[chosen]), return_inverse=True)
    documents, document = np.unique(_keys(second[chosen]), return_inverse=True)
    return Texts(
        queries.view(np.uint16).reshape(-1, QUERY_TOKENS),
        documents.view(np.uint16).reshape(-1, DOCUMENT_TOKENS),
        query.astype(np.int32),
        document.astype(np.int32),
        np.array([SOURCES.index(rows[i][1]) for i in chosen], np.uint8),
        np.array([-rows[i][0] for i in chosen], np.uint8),
        np.frombuffer(tokenizer.to_str().encode(), np.uint8),
    )


def split_of(pair: Pair) -> str:
    """The split of all pairs of a key."""
    place = _draw(pair.key) % 1000 // HELD_OUT_PER_MILLE
    return "unseen" if pair.unseen else {0: "validation", 1: "test"}.get(place, "train")


def train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE of lower-cased texts, in which token 0 is padding."""
    # Whoever only loads a file needs numpy alone.
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _tokens(tokenizer: Tokenizer, texts: list[str], width: int) -> NDArray[np.uint16]:
    rows = np.zeros((len(texts), width), np.uint16)
    for start in range(0, len(texts), 4096):
        for i, encoding in enumerate(
            tokenizer.encode_batch_fast(texts[start : start + 4096]), start
        ):
            rows[i, : min(width, len(encoding.ids))] = encoding.ids[:width]
    return rows


def _keys(rows: NDArray[np.uint16]) -> NDArray[np.void]:
    """A value for each row: np.unique is slow along an axis."""
    return np.ascontiguousarray(rows).view(f"V{rows.itemsize * rows.shape[1]}").ravel()


def _draw(key: str) -> int:
    """A number from a hash of a key: it stays if other keys come or go."""
    return zlib.crc32(key.encode())


def _clean(text: str) -> str:
    return " ".join(text.lower().split())[:CHARACTERS]


# --- WordNet --------------------------------------------------------------------------------------


class Synset(NamedTuple):
    """A synset's words, definition and examples, and the number of its lexicographer file."""

    words: list[str]
    gloss: str
    examples: list[str]
    file: int


_MARKER = re.compile(r"\((?:a|p|ip)\)$")  # an adjective's position, after its word
_EXAMPLE = re.compile(r'"([^"]+)"')


def read_synsets(path: Path) -> Iterator[Synset]:
    """The synsets of a data file of WordNet (wndb(5WN))."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(" "):  # the licence
                continue
            fields, _, text = line.partition(" | ")
            _, file, _, count, *rest = fields.split(" ")
            words = [
                _MARKER.sub("", word).replace("_", " ") for word in rest[: 2 * int(count, 16) : 2]
            ]
            gloss, *examples = text.strip().split('; "')
            found = _EXAMPLE.findall('; "'.join(["", *examples]))
            yield Synset(words, gloss.strip(), found, int(file))


def wordnet_pairs(path: Path) -> Iterator[Pair]:
    """Words with glosses, and examples with them, of a data file of WordNet."""
    for words, gloss, examples, file in read_synsets(path):
        for source, queries in (("wordnet", words), ("examples", examples)):
            for query in queries:
                yield Pair(source, f"gloss {gloss}", file in UNSEEN_FILES, query, gloss)


# --- packages -------------------------------------------------------------------------------------


def package_pairs(lists: Path) -> Iterator[Pair]:
    """Names and short descriptions of packages with their long ones, of apt's files."""
    descriptions = {
        stanza["Description-md5"]: stanza["Description-en"]
        for path in sorted(lists.glob("*_Translation-en"))
        for stanza in _stanzas(path)
    }
    stanzas = [stanza for path in sorted(lists.glob("*_Packages")) for stanza in _stanzas(path)]
    unseen = {_source(stanza) for stanza in stanzas if stanza.get("Section") == UNSEEN_SECTION}
    for stanza in stanzas:
        source = _source(stanza)
        short, *long = descriptions.get(stanza.get("Description-md5", ""), "").split("\n")
        text = " ".join(line for line in long if line != " .")  # an empty line
        for query in (stanza["Package"], short):
            yield Pair("packages", f"package {source}", source in unseen, query, text)


def _source(stanza: dict[str, str]) -> str:
    return stanza.get("Source", stanza["Package"]).partition(" ")[0]  # without its version


def _stanzas(path: Path) -> Iterator[dict[str, str]]:
    """The fields of each stanza (deb-control(5)); lines that go on keep their leading space."""
    for stanza in path.read_text(encoding="utf-8").split("\n\n"):
        fields = (field.partition(":") for field in re.split(r"\n(?=\S)", stanza.strip("\n")))
        if stanza.strip():
            yield {name: value.strip(" ") for name, _, value in fields}


# --- dictionaries ---------------------------------------------------------------------------------

_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"  # of dictd's numbers
_SPOKEN = re.compile(r"\s+(?:/|<).*")  # pronunciation and grammar after a headword
_ASIDE = re.compile(r"\s*(?:(?:see|note|synonyms?|antonyms?):|\").*", re.IGNORECASE)
#: Grammar, a subject, a number.
_TAG = re.compile(r"\s*(?:<[^>]*>|\[[^]]*\])|(?<!\S)(?:\d+|[IVX]+)\.(?!\S)")


def dictionary_pairs(index: Path) -> Iterator[Pair]:
    """Headwords of a dictionary from English with their translations, from files of dictd(8).

    A headword has its language before it ("german: house"): it would otherwise have as many right
    documents as there are dictionaries.
    """
    language = index.stem[-3:]
    text = gzip.decompress(index.with_suffix(".dict.dz").read_bytes())
    found: dict[str, list[str]] = {}
    places = {line.split("\t", 1)[1] for line in index.read_text(encoding="utf-8").splitlines()
              if not line.startswith("00")}  # fmt: skip
    for start, length in sorted(tuple(map(_number, place.split("\t"))) for place in places):
        head, *lines = text[start : start + length].decode().split("\n")
        parts = [_TAG.sub("", line).strip(" .,") for line in lines if not _ASIDE.match(line)]
        found.setdefault(_SPOKEN.sub("", head), []).extend(filter(None, parts))
    for word in sorted(found, key=lambda word: (_draw(f"choice {word}"), word))[:HEADWORDS]:
        yield Pair(
            "dictionary",
            f"word {word.lower()}",
            language == UNSEEN_LANGUAGE,
            f"{LANGUAGES[language]}: {word}",
            "; ".join(found[word]),
        )


def _number(digits: str) -> int:
    value = 0
    for digit in digits:
        value = 64 * value + _DIGITS.index(digit)
    return value


# --- manual pages ---------------------------------------------------------------------------------

_FONTS = {"B", "I", "SM", "SB", "BI", "BR", "IB", "IR", "RB", "RI"}  # of man(7)
_SYSTEMS = {"Ux": "UNIX", "Fx": "FreeBSD", "Bx": "BSD", "Nx": "NetBSD", "Ox": "OpenBSD"}
_INLINE = {"Ad", "Aq", "Ar", "Bq", "Cd", "Cm", "Dq", "Dv", "Em", "Er", "Ev", "Fa", "Fl", "Fn",
           "Ft", "Ic", "In", "Li", "Nd", "Nm", "No", "Ns", "Op", "Pa", "Pq", "Ql", "Qq", "Sq",
           "Sy", "Tn", "Va", "Vt", "Xr", "Xo", "Xc"}  # of mdoc(7)  # fmt: skip
#: Macros between which nothing is read.
_VERBATIM = {"nf": "fi", "EX": "EE", "Vb": "Ve", "Bd": "Ed", "TS": "TE", "de": ".", "ig": "."}
_ESCAPES = [
    (r'\\".*', ""),
    (r"\\f(?:\(..|\[.*?\]|.)|\\s[-+]?\d+|\\[hv]'[^']*'", ""),
    (r"\\[(*\[]+(?:aq|cq|oq)\]?|\\'", "'"),
    (r"\\\((?:hy|en|em|mi)|\\-", "-"),
    (r"\\[(*]\(?..|\\[*]?\[[^]]*\]|\\\*.|\\n(?:\(..|.)", ""),
    (r"\\[e\\]", "/"),
    (r"\\[ ~0]", " "),
    (r"\\.", ""),
]


def manual_pairs(path: Path) -> Iterator[Pair]:
    """The names and the description of a page (man(7) or mdoc(7)) with the page's first words."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in gzip.decompress(path.read_bytes()).decode(errors="replace").split("\n"):
        if heading := re.match(r"\.\s*S[Hh]\s+\"?([^\"]*)", line):
            lines = sections.setdefault(heading[1].strip().upper(), [])
        else:
            lines.append(line)
    names, _, short = _plain(sections.get("NAME", []), "").partition(" - ")
    words = names.replace(",", " ").split()
    if not words:
        return
    text = _plain(sections.get("DESCRIPTION", [])[:100], words[0])
    chapter = path.parent.name.removeprefix("man")
    for query in (*words, short):
        yield Pair("manual", f"page {words[0]}({chapter})", chapter == UNSEEN_CHAPTER, query, text)


def _plain(lines: Iterable[str], name: str) -> str:
    """The words of lines of a page, without markup, tables and examples.

    Args:
        lines: of a section.
        name: the page's, for which mdoc has a macro.
    """
    parts: list[str] = []
    end = ""
    for line in lines:
        control = line[1:].split(None, 1)[0] if line[:1] in (".", "'") and line[1:].strip() else ""
        if end:
            end = "" if control == end else end
        elif control in _VERBATIM:
            end = _VERBATIM[control]
        elif control:
            parts.append(_words(control, _unescaped(line.partition(control)[2]), name))
        elif line[:1] != ".":
            parts.append(_unescaped(line))
    text = " ".join(" ".join(parts).split())
    return re.sub(r" ([,.;:)?!]+)(?= |$)", r"\1", text).replace("( ", "(")


def _words(control: str, text: str, name: str) -> str:
    """What a macro's line shows."""
    words = [quoted or word for quoted, word in re.findall(r'"([^"]*)"|(\S+)', text)]
    if control in _FONTS:  # those of two letters alternate, without spaces
        return ("" if len(control) == 2 and control[0] != "S" else " ").join(words)
    if control == "Nm" and not (words and words[0][0].isalnum()):
        words = [name, *words]
    if control == "Nd" or control in _SYSTEMS:
        words = [_SYSTEMS.get(control, "-"), *words]
    shown = (word for word in words if word not in _INLINE)
    return " ".join(shown) if control in _INLINE or control in _SYSTEMS else ""


def _unescaped(text: str) -> str:
    for pattern, replacement in _ESCAPES:
        text = re.sub(pattern, replacement, text)
    return text
