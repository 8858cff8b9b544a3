from __future__ import annotations

import base64
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from megabatch.data import Pair
from megabatch.data.glyphs import GlyphSet
from megabatch.evaluation.answers import Answers
from megabatch.evaluation.captions import JoinedTexts
from megabatch.evaluation.report.examples import encode, galleries
from megabatch.evaluation.tasks import Matched, Task, glyph_tasks
from tests.evaluation.report.conftest import image_ids


def test_queries_show_the_five_best_answers_and_the_rank_of_the_right_one(
    task: Task, matched: Matched
) -> None:
    there, back = galleries(matched, task.picture_of, examples=6, failures=3)
    scores = matched.features @ matched.text_features.T
    names = [matched.texts[i] for i in image_ids(matched)]
    for gallery in (there, back):
        assert (len(gallery.examples), len(gallery.failures)) == (6, 3)
        assert all(q.rank > 1 for q in gallery.failures)
    for query in there.examples + there.failures:
        assert query.picture
        # Several images have a name: the query is the one with these cosines.
        cosines = torch.tensor([a.cosine for a in query.answers])
        best = scores.sort(descending=True)
        (place,) = (best.values[:, :5] - cosines).abs().amax(1).lt(1e-4).nonzero().flatten()
        ranked = best.indices[place].tolist()
        assert [a.text for a in query.answers] == [matched.texts[i] for i in ranked[:5]]
        assert query.text == names[place]
        assert query.rank == 1 + ranked.index(int(image_ids(matched)[place]))
        assert all(a.known and a.picture for a in query.answers)
    for query in back.examples + back.failures:
        assert query.picture is None
        column = scores[:, matched.texts.index(query.text)]
        ranked = column.argsort(descending=True).tolist()
        assert [a.text for a in query.answers] == [names[i] for i in ranked[:5]]
        rights = [place for place, i in enumerate(ranked, 1) if names[i] == query.text]
        assert query.rank == rights[0]
    for query in [q for gallery in (there, back) for q in gallery.examples + gallery.failures]:
        assert [a.right for a in query.answers] == [a.text == query.text for a in query.answers]
        assert [a.rank for a in query.answers] == [1, 2, 3, 4, 5]
        assert (query.missed is None) == any(a.right for a in query.answers)
    assert any(q.rank == 1 for q in there.examples)


def test_a_right_answer_beyond_the_first_five_is_shown_at_its_rank(matched: Matched) -> None:
    shifted = replace(matched, text_features=matched.text_features.roll(1, 0))
    for gallery in galleries(shifted, examples=4, failures=0):
        missed = [(q.rank, q.text, q.missed) for q in gallery.examples if q.missed]
        assert missed
        for rank, text, answer in missed:
            assert rank > 5
            assert (answer.rank, answer.text, answer.right) == (rank, text, True)
            assert answer.picture


def test_of_several_right_texts_the_best_is_ranked_and_each_is_marked(matched: Matched) -> None:
    two = replace(
        matched,
        texts=[f"{text} {i}" for text in matched.texts for i in (1, 2)],
        text_features=F.normalize(
            matched.text_features.repeat_interleave(2, 0)
            + 0.05 * torch.randn(2 * len(matched.texts), 16),
            dim=1,
        ),
        answers=Answers.by_ids(
            image_ids(matched), torch.arange(len(matched.texts)).repeat_interleave(2)
        ),
    )
    there, _ = galleries(two, examples=8, failures=0)
    for query in there.examples:
        right = [answer.rank for answer in query.answers if answer.right]
        assert len(right) <= 2
        if right:
            assert query.rank == right[0]
    assert any(len([a for a in q.answers if a.right]) == 2 for q in there.examples)


class Texts:
    """Pairs of texts."""

    first = "text"

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Pair:
        return Pair(f"query {index}" + 500 * "x", f"answer {index}", str(index))


def test_pairs_of_texts_have_texts_on_both_sides_and_no_picture() -> None:
    torch.manual_seed(0)
    features = F.normalize(torch.randn(2, 30, 4), dim=2)
    ids = torch.arange(30)
    answers = [f"answer {i}" for i in ids.tolist()]
    matched = Matched(
        *(JoinedTexts(Texts()), ids.tolist(), features[0], answers, features[1]),  # type: ignore[arg-type]
        Answers.by_pairs(ids, ids, 30, 30),
    )
    there, back = galleries(matched)
    for gallery, asked, found in ((there, "query", "answer"), (back, "answer", "query")):
        assert len(gallery.examples) == 8
        for query in gallery.examples:
            number = query.text.split()[1].rstrip("x…")
            right = [a for a in [*query.answers, query.missed] if a is not None and a.right]
            assert len(right) == 1
            assert right[0].text.startswith(f"{found} {number}")
            assert query.text.startswith(f"{asked} ")
            assert max(map(len, [query.text, *(a.text for a in query.answers)])) <= 400
            assert query.picture is None
            assert all(a.picture is None for a in query.answers)


def test_names_that_training_has_not_are_shown_as_such(small_glyphs: GlyphSet) -> None:
    faces, characters = glyph_tasks(small_glyphs)
    unseen = characters.samples[0].target[0]
    assert faces.picture_of is not None
    assert characters.picture_of is not None
    assert faces.picture_of(unseen) is None
    shown = characters.picture_of(unseen)
    assert shown is not None
    assert shown[1] is False


def test_without_pictures_of_its_own_a_task_shows_evaluated_images(matched: Matched) -> None:
    there, _ = galleries(matched, examples=2, failures=0)
    assert all(a.picture and a.known is None for q in there.examples for a in q.answers)


def test_only_texts_that_have_an_image_are_queries(matched: Matched) -> None:
    more = replace(
        matched,
        texts=[*matched.texts, *(f"without {i}" for i in range(500))],
        text_features=torch.cat([matched.text_features, torch.randn(500, 16)]),
        answers=Answers.by_ids(image_ids(matched), torch.arange(len(matched.texts) + 500)),
    )
    _, back = galleries(more)
    assert not any(q.text.startswith("without") for q in back.examples + back.failures)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1", "I;16"])
def test_pictures_of_any_mode_become_small(mode: str) -> None:
    picture = encode(Image.new(mode, (300, 150)))
    head, data = picture.uri.split(",")
    assert head == f"data:image/{picture.kind};base64"
    assert not picture.small
    with Image.open(io.BytesIO(base64.b64decode(data))) as decoded:
        assert decoded.size == (128, 64)
        assert decoded.format == picture.kind.upper()


def test_photographs_become_jpegs_and_drawings_pngs() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)
    photograph = encode(Image.fromarray(noise).resize((800, 600), Image.Resampling.BICUBIC))
    assert photograph.kind == "jpeg"
    assert len(photograph.data) < 12_000
    assert encode(Image.new("RGB", (300, 300), "white")).kind == "png"


def test_small_pictures_keep_their_pixels() -> None:
    pixels = np.arange(1024, dtype=np.uint8).reshape(32, 32)
    picture = encode(Image.fromarray(pixels))
    assert picture.small
    with Image.open(io.BytesIO(base64.b64decode(picture.uri.split(",")[1]))) as decoded:
        assert np.array_equal(np.asarray(decoded), pixels)
