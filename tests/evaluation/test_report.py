from __future__ import annotations

import base64
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from megabatch.data.glyphs import GlyphSet
from megabatch.evaluation.report import choose_queries, encode
from megabatch.evaluation.tasks import Matched, Task, glyph_tasks


@pytest.fixture
def task(small_glyphs: GlyphSet) -> Task:
    return glyph_tasks(small_glyphs)[0]


@pytest.fixture
def matched(task: Task) -> Matched:
    """Features that find the right name for most images and a wrong one for the others."""
    captions = [task.samples[i].target[0] for i in range(len(task.samples))]
    texts = sorted(set(captions))
    ids = torch.tensor([texts.index(c) for c in captions])
    torch.manual_seed(0)
    text_features = F.normalize(torch.randn(len(texts), 16), dim=1)
    features = F.normalize(text_features[ids] + 0.35 * torch.randn(len(captions), 16), dim=1)
    indices = list(range(len(captions)))
    return Matched(
        task.samples, indices, features, ids, texts, text_features, torch.arange(len(texts))
    )


def test_queries_show_the_five_best_names_and_the_rank_of_the_right_one(
    task: Task, matched: Matched
) -> None:
    examples, failures = choose_queries(matched, task.picture_of, examples=6, failures=3)
    assert len(examples) == 6
    assert len(failures) == 3
    assert len({q.key for q in examples + failures}) == 9
    keys = [task.samples[i].key for i in range(len(task.samples))]
    scores = matched.features @ matched.text_features.T
    for query in examples + failures:
        place = keys.index(query.key)
        best = scores[place].argsort(descending=True)
        assert [a.text for a in query.answers] == [matched.texts[i] for i in best[:5]]
        assert query.rank == 1 + best.tolist().index(int(matched.image_ids[place]))
        assert [a.right for a in query.answers] == [a.text == query.text for a in query.answers]
        assert all(a.known and a.picture for a in query.answers)
    assert all(q.rank > 1 for q in failures)
    assert any(q.rank == 1 for q in examples)


def test_of_several_right_texts_the_best_is_named_and_each_is_marked(matched: Matched) -> None:
    two = replace(
        matched,
        texts=[f"{text} {i}" for text in matched.texts for i in (1, 2)],
        text_features=F.normalize(
            matched.text_features.repeat_interleave(2, 0)
            + 0.05 * torch.randn(2 * len(matched.texts), 16),
            dim=1,
        ),
        text_ids=matched.text_ids.repeat_interleave(2),
    )
    examples, _ = choose_queries(two, examples=8, failures=0)
    for query in examples:
        right = [place for place, answer in enumerate(query.answers, 1) if answer.right]
        assert len(right) <= 2
        if right:
            assert query.rank == right[0]
            assert query.text == query.answers[right[0] - 1].text
    assert any(len([a for a in q.answers if a.right]) == 2 for q in examples)


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
    examples, _ = choose_queries(matched, examples=2, failures=0)
    assert all(a.picture and a.known is None for q in examples for a in q.answers)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1", "I;16"])
def test_pictures_of_any_mode_become_small_pngs(mode: str) -> None:
    picture = encode(Image.new(mode, (300, 150)))
    head, data = picture.uri.split(",")
    assert head == "data:image/png;base64"
    assert not picture.small
    with Image.open(io.BytesIO(base64.b64decode(data))) as decoded:
        assert decoded.size == (128, 64)


def test_small_pictures_keep_their_pixels() -> None:
    pixels = np.arange(1024, dtype=np.uint8).reshape(32, 32)
    picture = encode(Image.fromarray(pixels))
    assert picture.small
    with Image.open(io.BytesIO(base64.b64decode(picture.uri.split(",")[1]))) as decoded:
        assert np.array_equal(np.asarray(decoded), pixels)
