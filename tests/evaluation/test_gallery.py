from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from megabatch.data.glyphs import GlyphSet
from megabatch.evaluation.embed import EmbeddedPairs
from megabatch.evaluation.gallery import choose_queries, encode
from megabatch.evaluation.tasks import Scored, Task, glyph_tasks


@pytest.fixture
def scored(small_glyphs: GlyphSet) -> Scored:
    """Features that find the right name for most images and a wrong one for the others."""
    task = glyph_tasks(small_glyphs)[0]
    captions = task.pairs.captions  # type: ignore[attr-defined]
    texts = sorted(set(captions))
    text_ids = torch.tensor([texts.index(c) for c in captions])
    torch.manual_seed(0)
    text_features = F.normalize(torch.randn(len(texts), 16), dim=1)
    features = F.normalize(text_features[text_ids] + 0.35 * torch.randn(len(captions), 16), dim=1)
    images = EmbeddedPairs(features, captions, list(range(len(captions))))
    return Scored(task, images, text_ids, texts, text_features, {})


def test_queries_show_the_five_best_names_and_the_rank_of_the_right_one(scored: Scored) -> None:
    examples, failures = choose_queries(scored, examples=6, failures=3)
    assert len(examples) == 6
    assert len(failures) == 3
    assert len({q.key for q in examples + failures}) == 9
    keys = [scored.task.pairs[i].key for i in range(len(scored.task.pairs))]
    scores = scored.images.features @ scored.text_features.T
    for query in examples + failures:
        place = keys.index(query.key)
        best = scores[place].argsort(descending=True)
        assert [a.text for a in query.answers] == [scored.texts[i] for i in best[:5]]
        assert query.rank == 1 + best.tolist().index(int(scored.text_ids[place]))
        assert [a.right for a in query.answers] == [a.text == query.text for a in query.answers]
        assert all(a.known and a.picture for a in query.answers)
    assert all(q.rank > 1 for q in failures)
    assert any(q.rank == 1 for q in examples)


def test_names_that_training_has_not_are_shown_as_such(small_glyphs: GlyphSet) -> None:
    faces, characters = glyph_tasks(small_glyphs)
    unseen = characters.pairs[0].caption
    assert faces.picture_of is not None
    assert characters.picture_of is not None
    assert faces.picture_of(unseen) is None
    shown = characters.picture_of(unseen)
    assert shown is not None
    assert shown[1] is False


def test_without_pictures_of_its_own_a_task_shows_evaluated_images(scored: Scored) -> None:
    plain = Task("pairs", "pairs", "", scored.task.pairs)
    examples, _ = choose_queries(
        Scored(plain, scored.images, scored.text_ids, scored.texts, scored.text_features, {}),
        examples=2,
        failures=0,
    )
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
