from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import draw_texts
from machinery.text_pairs import (
    LANGUAGES,
    SHARED,
    SPLITS,
    Pair,
    dictionary_pairs,
    make_texts,
    manual_pairs,
    package_pairs,
    read_synsets,
    split,
    split_of,
    wordnet_pairs,
)

WORDNET = (
    "  1 This software and database is being provided to you, the LICENSEE, by\n"
    "00000001 13 n 02 hot_dog 0 red_hot(a) 0 001 @ 00000000 n 0000"
    ' | a sausage; in a bun; "he ate a hot dog"; "a red hot, please"  \n'
    "00000002 03 n 01 thing 0 000 | an object  \n"
)
PACKAGES = """Package: libtile2
Source: tile (2.0-1)
Description: tiles
Description-md5: 01
Section: science
Tag: role::shared,
 implemented-in::c

Package: tile
Description-md5: 02
Section: libs
"""
TRANSLATIONS = """Package: libtile2
Description-md5: 01
Description-en: exact losses in tiles
 It computes: a loss.
 .
  - In tiles.
"""
DICTIONARY = {
    "00databaseinfo": "00-database-info\nEnglish-German, GPL\n",
    "ashtray": 'ash-tray /æʃ/ <n>\nAscher <masc> [ugs.], Aschenbecher\n  "the ash-tray"  - der\n'
    " see: {ash}\n   Note: x\n",
    "run": "run //ɹʌn// <v>\n1. laufen 2.\nmove fast\nI.  <N>  Lauf\n",
}
PAGE = r""".\" comment
.de Vb
text of a macro
..
.SH "NAME"
open, openat \- open \fIa\fR file
.SH DESCRIPTION
The
.BR open ()
call\&'s \f(CWfile\fR, a \(lqfile\(rq
.RI ( path ),
.nf
int x;
.fi
.PP
is \s-1NEW\s0.
.SH "SEE ALSO"
more
"""
MDOC = r""".Sh NAME
.Nm aue ,
.Nm ue
.Nd USB driver
.Sh DESCRIPTION
The
.Nm
driver of
.Fx 5.0
takes
.Dq Fl x
and
.Ar file .
.Bd -literal
device aue
.Ed
"""


def digits(number: int) -> str:
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"[number]


def write_dictionary(folder: Path, language: str, entries: dict[str, str]) -> Path:
    text, lines = b"", []
    for word, entry in entries.items():
        places = [digits(n // 64) + digits(n % 64) for n in (len(text), len(entry.encode()))]
        lines.append("\t".join([word, *places]) + "\n")
        text += entry.encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"freedict-eng-{language}.dict.dz").write_bytes(gzip.compress(text))
    index = folder / f"freedict-eng-{language}.index"
    index.write_text("".join(lines), encoding="utf-8")
    return index


def write_page(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(gzip.compress(text.encode()))
    return folder / name


def write_lists(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "main_Packages").write_text(PACKAGES)
    (folder / "main_Translation-en").write_text(TRANSLATIONS)
    return folder


def test_wordnet(tmp_path: Path) -> None:
    path = tmp_path / "data.noun"
    path.write_text(WORDNET)
    gloss = "a sausage; in a bun"
    assert next(read_synsets(path)) == (
        ["hot dog", "red hot"], gloss, ["he ate a hot dog", "a red hot, please"], 13,
    )  # fmt: skip
    pairs = list(wordnet_pairs(path))
    assert [pair.source for pair in pairs] == ["wordnet"] * 2 + ["examples"] * 2 + ["wordnet"]
    assert {(pair.key, pair.unseen, pair.document) for pair in pairs} == {
        (f"gloss {gloss}", True, gloss),
        ("gloss an object", False, "an object"),
    }


def test_packages(tmp_path: Path) -> None:
    text = " It computes: a loss.   - In tiles."
    found = {("libtile2", text), ("exact losses in tiles", text), ("tile", ""), ("", "")}
    pairs = set(package_pairs(write_lists(tmp_path)))
    assert pairs == {Pair("packages", "package tile", True, *both) for both in found}


def test_dictionaries_lose_pronunciation_grammar_and_examples(tmp_path: Path) -> None:
    pairs = dictionary_pairs(write_dictionary(tmp_path, "deu", DICTIONARY))
    assert {pair.query: pair.document for pair in pairs} == {
        "german: ash-tray": "Ascher, Aschenbecher",
        "german: run": "laufen; move fast; Lauf",
    }


@pytest.mark.parametrize(
    ("chapter", "page", "queries", "text"),
    [
        ("2", PAGE, ["open", "openat", "open a file"],
         "The open() call's file, a file (path), is NEW."),
        ("4", MDOC, ["aue", "ue", "USB driver"],
         "The aue driver of FreeBSD 5.0 takes x and file."),
    ],
)  # fmt: skip
def test_manual_pages_lose_markup_and_examples(
    tmp_path: Path, chapter: str, page: str, queries: list[str], text: str
) -> None:
    pairs = list(manual_pairs(write_page(tmp_path / f"man{chapter}", "page.gz", page)))
    assert [pair.query for pair in pairs] == queries
    assert {(pair.document, pair.unseen, pair.key) for pair in pairs} == {
        (text, chapter == "4", f"page {queries[0]}({chapter})")
    }


def test_a_pair_is_in_one_split_and_boilerplate_in_none() -> None:
    pairs = [Pair("wordnet", f"key {i}", i > 990, f"word {i}", f"gloss {i}") for i in range(1000)]
    again = [pair._replace(key="other", unseen=True) for pair in pairs[:5]]
    boilerplate = [Pair("manual", "key", False, f"name {i}", "as above") for i in range(SHARED + 1)]
    texts = make_texts([*pairs, *boilerplate, *again], 300)
    tokenizer = Tokenizer.from_str(texts.tokenizer.tobytes().decode())
    assert texts.queries.shape == (1000, 16)
    assert texts.documents.shape == (1000, 48)
    splits = {
        tokenizer.decode(query.tolist()).strip(): name
        for name in SPLITS
        for query in split(texts._asdict(), name)[0]
    }
    assert len(texts.query) == len(splits) == 1000
    unseen = {f"word {i}" for i in range(1000) if i > 990 or i < 5}
    assert splits == {
        pair.query: "unseen" if pair.query in unseen else split_of(pair) for pair in pairs
    }
    assert set(splits.values()) == set(SPLITS)
    shuffled = make_texts([*again, *boilerplate, *pairs[::-1]], 300)
    for array, same in zip(texts, shuffled, strict=True):
        np.testing.assert_array_equal(array, same)


def test_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    share = tmp_path / "files/usr/share"
    (share / "wordnet").mkdir(parents=True)
    for part in ("noun", "verb", "adj", "adv"):
        (share / f"wordnet/data.{part}").write_text(WORDNET)
    for language in LANGUAGES:
        write_dictionary(share / "dictd", language, DICTIONARY)
    page = write_page(share / "man/man2", "open.2.gz", PAGE)
    (page.parent / "openat.2.gz").symlink_to(page.name)
    output = tmp_path / "texts.npz"
    arguments = ["files", "lists", "--output", "texts.npz"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["draw_texts.py", *arguments])
    write_lists(tmp_path / "lists")
    draw_texts.main()
    first = output.read_bytes()
    draw_texts.main()
    assert output.read_bytes() == first
    with np.load(output) as texts:
        queries, documents, ids = split(texts, "train")
    assert len(queries) == 1 + 2 * (len(LANGUAGES) - 1) + 3
    assert len(np.unique(documents, axis=0)) == len(np.unique(ids)) == 1 + 2 + 1
    assert "|manual|train|3|3|1|" in capsys.readouterr().out
