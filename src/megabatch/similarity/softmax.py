"""Log-sum-exps of the rows and columns of a matrix, split by whether a pair's ids are equal.

The method is Inf-CL's (arXiv 2410.17243, section 3: tiles that are never stored) with one sweep
for both directions, and FlashAttention's running sums (arXiv 2205.14135).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import compress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from megabatch.similarity import backends, eager, settings, states
from megabatch.similarity.arguments import (
    accumulator_dtype,
    cast_for_autocast,
    check_features,
    check_guide,
    check_ids,
    check_integers,
    check_same_rows,
    check_scalar,
    check_two,
    check_vector,
)
from megabatch.similarity.bias import with_column_bias
from megabatch.similarity.distributed import schedule
from megabatch.similarity.distributed.comm import group_name
from megabatch.similarity.distributed.schedule import Ranks
from megabatch.similarity.eager import SoftmaxTiles, SoftTargetTiles
from megabatch.similarity.eager_maxsim import WIDEST, MaxSimTiles
from megabatch.similarity.matrix import DROPPED, PAIRED, PLAIN, Matrix, Orders, Side, sort_by_id
from megabatch.similarity.ops import Reduction
from megabatch.similarity.settings import applied
from megabatch.similarity.sweep import Sweep, gradients, in_given_order, reduce
from megabatch.torch_internals import transforms_active

Ids: TypeAlias = "str | Tensor | tuple[Tensor, Tensor]"
Guides: TypeAlias = "Tensor | tuple[Tensor, Tensor]"


# --- public functions -----------------------------------------------------------------------------


class Split(NamedTuple):
    """One side of a similarity matrix, split by whether the ids of a pair are equal; each
    (rows,)."""

    negative: Tensor  #: log-sum-exp over pairs of different ids; -inf if there are none
    positive: Tensor  #: log-sum-exp over pairs of equal ids; -inf if there are none
    positive_sum: Tensor  #: sum of the logits of the pairs of equal ids
    positive_count: Tensor  #: number of the pairs of equal ids; no gradient

    @classmethod
    def of(cls, stack: Tensor) -> Split:
        """The parts of a side of `Stacks`."""
        if len(stack) == 4:
            negative, positive, positive_sum, positive_count = stack.unbind()
            return cls(negative, positive, positive_sum, positive_count.detach())
        (negative,) = stack.unbind()  # no pair can be positive
        nothing = torch.zeros_like(negative)
        return cls(negative, torch.full_like(negative, -math.inf), nothing, nothing)


class Stacks(NamedTuple):
    """Both sides as one tensor each, which a loss of few launches takes; see `Split.of`."""

    rows: Tensor  #: (4, m), or (1, m) if no pair can be positive: the parts of a `Split`
    columns: Tensor | None  #: (4 or 1, n); None if the side is left out
    batch: Tensor | None  #: () int64 on the CPU, the rows of all processes; None: one process


def logsumexp(
    x: Tensor,
    y: Tensor,
    scale: float | Tensor = 1.0,
    *,
    row_weight: Tensor | None = None,
    col_lengths: Tensor | None = None,
    col_bias: Tensor | None = None,
    sides: str = "both",
    group: object = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-sum-exp of scale * x @ y.T along each axis, from one sweep that never stores it.

    Args:
        x: (m, d) features, any floating dtype. y: (n, d), same device and dtype; under autocast
            dtypes may differ if it casts both to one.
            Both of three dimensions, (m, l, d) and (n, k, d): late interaction. S_ij is then scale
            times the sum over tokens of x_i of the largest product with a token of y_j (Khattab
            and Zaharia 2020, arXiv 2004.12832, equation 3), of equal ones the first.
        scale: a number, or a tensor of shape () or (1,); differentiable.
        row_weight: (m,) factors of the sums of late interaction. No gradient flows into them.
        col_lengths: (n,) integers: of late interaction's columns, how many of the first tokens
            count. A column without any has logits of -inf.
        col_bias: (n,) floating-point numbers, each added to all logits of its column, at the cost
            of up to 10 further features; not with late interaction. Times 16 and divided by the
            scale, they must fit into the features' dtype: with float16, numbers up to 4,000 * scale
            do. Others raise an error, on a GPU they give NaN. Differentiable; the gradient is
            rounded to the features' dtype, as theirs is.
        sides: "both", or "rows" to leave out the columns' side, which then costs nothing.
        group: the processes that share the matrix, each with its own rows of x and of y: None for
            the default group where torch.distributed is initialised, a process group, a
            DeviceMesh of one dimension, or "local" for this process alone. `rows` and `columns` are
            those of this process's x and y.

    Returns:
        `(rows (m,), columns (n,))` in float32 (float64 for float64 features); columns is None
        with `sides="rows"`. A side without any pair is -inf and has zero gradient.

    Raises:
        TypeError, ValueError: the message names the argument, its value and what was expected, or
            what each process had where they disagree.
        CommunicationError: another process is gone, or did not make its call in time.
    """
    both = _both(sides)
    weight, lengths = check_matrix(x, y, row_weight, col_lengths, col_bias)
    x, y = cast_for_autocast(x, y)
    scale, width = check_scalar("scale", scale, x), 0
    if col_bias is not None:
        width, (x, y) = x.shape[1], with_column_bias(x, y, scale, col_bias)
    tensors = x, y, scale, *[None] * 6, weight, lengths, PLAIN
    rows, columns, *_ = logsumexps(
        *make_operands(*tensors, cols=both, group=group, call="logsumexp", width=width)
    )
    return rows[0], columns[0] if both else None


def split_logsumexp(
    x: Tensor,
    y: Tensor | None = None,
    scale: float | Tensor = 1.0,
    *,
    ids: Ids = "paired",
    positives: str = "ids",
    ceiling: Tensor | None = None,
    guide: Guides | None = None,
    row_weight: Tensor | None = None,
    col_lengths: Tensor | None = None,
    col_bias: Tensor | None = None,
    sides: str = "both",
    group: object = None,
) -> tuple[Split, Split | None]:
    """Log-sum-exps of scale * x @ y.T split by whether the ids of a pair are equal.

    Args:
        x: (m, d) features, any floating dtype.
        y: (n, d), as in `logsumexp`. None: x against itself, without each row's pair with itself,
            and at half the cost, as the matrix is symmetric; not with late interaction.
        scale: a number, or a tensor of shape () or (1,); differentiable.
        ids: "paired" (row i belongs to column i), or `(row_ids (m,), column_ids (n,))`, integers;
            with y=None one vector of ids serves both. A negative id equals no other id.
        positives: "ids": all pairs of equal ids are positives; or "paired": only (i, i) is, and
            other pairs of equal ids are left out (known false negatives).
        ceiling: (m,) logits; pairs of different ids whose logit exceeds their row's ceiling are
            left out (margin-based false negatives). No gradient flows into it.
        guide: `(guide_x (m, d'), guide_y (n, d'))`, another model's features of any width; with
            y=None one matrix serves both; not with late interaction. The ceiling then applies to
            their products <guide_x_i, guide_y_j>, without the scale, instead of the logits. Any
            floating-point dtype, but float64 if and only if x is; autocast does not cast them.
            Products and sums are in
            float32; NaN exceeds no ceiling. No gradient flows into them.
        row_weight, col_lengths, col_bias: as in `logsumexp`; y=None takes no bias. Ceilings bound
            logits with it.
        sides: "both", or "rows" to leave out the columns' side, which then costs nothing.
        group: as in `logsumexp`. "paired" means row i and column i of the same process; ids are
            compared across all processes.

    Returns:
        `(rows, columns)`, each a `Split`, in float32 (float64 for float64 features); columns is
        None with `sides="rows"`. A log-sum-exp over no pairs is -inf and has zero gradient.

    Raises:
        TypeError, ValueError, CommunicationError: as `logsumexp`.
    """
    options: dict[str, Any] = {
        "positives": positives,
        "ceiling": ceiling,
        "guide": guide,
        "row_weight": row_weight,
        "col_lengths": col_lengths,
        "col_bias": col_bias,
        "sides": sides,
    }
    stacks = split_stacks(x, y, scale, ids=ids, group=group, **options)
    rows = Split.of(stacks.rows)
    if stacks.columns is None or stacks.columns is stacks.rows:
        return rows, None if stacks.columns is None else rows
    return rows, Split.of(stacks.columns)


def split_stacks(
    x: Tensor,
    y: Tensor | None,
    scale: float | Tensor,
    *,
    ids: Ids = "paired",
    positives: str = "ids",
    ceiling: Tensor | None = None,
    guide: Guides | None = None,
    row_weight: Tensor | None = None,
    col_lengths: Tensor | None = None,
    col_bias: Tensor | None = None,
    sides: str = "both",
    group: object = None,
    terms: str = "",
) -> Stacks:
    """`split_logsumexp` for losses: each side as one tensor, and the number of all rows.

    `terms`: a description of more on which all processes must agree; if it differs, each raises.
    """
    both = _both(sides)
    weight, lengths = check_matrix(x, y, row_weight, col_lengths, col_bias)
    if y is None:
        (x,) = cast_for_autocast(x)
    else:
        x, y = cast_for_autocast(x, y)
    row_ids, col_ids = check_ids(ids, x, x if y is None else y, one=y is None)
    if positives not in ("ids", "paired"):
        raise ValueError(f"positives: expected 'ids' or 'paired', got {positives!r}")
    if positives == "paired" and y is None:
        raise ValueError("positives: expected 'ids' with y=None, got 'paired'")
    paired = positives == "paired" or row_ids is None
    if paired and y is not None:
        check_same_rows(x, y)
    scale, width = check_scalar("scale", scale, x), 0
    if col_bias is not None and y is not None:
        width, (x, y) = x.shape[1], with_column_bias(x, y, scale, col_bias)
    if ceiling is not None:
        ceiling = check_vector("ceiling", ceiling, x.shape[0], x)
    if guide is not None and ceiling is None:
        raise ValueError("ceiling: expected one for the guide's similarities, got None")
    if guide is not None and x.dim() == 3:
        raise ValueError(f"guide: expected None for x of shape (m, l, d), got one of {len(x)} rows")
    guides = (None, None) if guide is None else check_guide(guide, x, y)
    diagonal = DROPPED if y is None else PAIRED if paired else PLAIN
    # A ceiling or two vectors of ids make the matrix asymmetric: all tiles are computed.
    symmetric = y is None and ceiling is None and row_ids is col_ids
    columns = None if symmetric else x if y is None else y
    tensors = x, columns, scale, row_ids, col_ids, ceiling, *guides, None, weight, lengths, diagonal
    operands = make_operands(
        *tensors,
        cols=both and not symmetric,
        group=group,
        call=f"split_logsumexp, {terms}" if terms else "split_logsumexp",
        width=width,
    )
    row_stack, col_stack, sizes, _ = logsumexps(*operands)
    columns = (row_stack if symmetric else col_stack) if both else None
    return Stacks(row_stack, columns, sizes[0].sum() if operands.group else None)


def check_matrix(
    x: Tensor,
    y: Tensor | None,
    row_weight: Tensor | None,
    col_lengths: Tensor | None,
    col_bias: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Check features (m, d), or with y of late interaction; returns its weights and lengths."""
    tokens = y is not None and isinstance(x, Tensor) and x.dim() == 3
    if y is None:
        check_features("x", x)
    else:
        check_two(x, y, tokens=tokens)
    for name, value in (("row_weight", row_weight), ("col_lengths", col_lengths)):
        if value is not None and not tokens:
            raise ValueError(f"{name}: expected None for x of shape (m, d), got a tensor")
    if col_bias is not None and (tokens or y is None):
        without = "with y=None" if y is None else "for x of shape (m, l, d)"
        raise ValueError(f"col_bias: expected None {without}, got a tensor")
    if row_weight is not None:
        row_weight = check_vector("row_weight", row_weight, x.shape[0], x).detach()
    if col_lengths is not None and y is not None:
        col_lengths = check_integers("col_lengths", col_lengths, y.shape[0], x)
    return row_weight, col_lengths


def _both(sides: str) -> bool:
    if sides not in ("both", "rows"):
        raise ValueError(f"sides: expected 'both' or 'rows', got {sides!r}")
    return sides == "both"


# --- the operators --------------------------------------------------------------------------------


class Operands(NamedTuple):
    """Operands of the operators; y None: x against itself."""

    x: Tensor
    y: Tensor | None
    scale: Tensor
    row_ids: Tensor | None
    col_ids: Tensor | None
    ceiling: Tensor | None
    guide_x: Tensor | None  #: a guide's features, or a teacher's
    guide_y: Tensor | None
    teacher_scale: Tensor | None  #: given: the targets are soft, see `soft_targets`
    row_weight: Tensor | None  #: of late interaction, see `logsumexp`
    col_lengths: Tensor | None  #: likewise
    diagonal: str  #: of `Matrix`
    width: int  #: of `Matrix`
    cols: bool  #: whether the columns' side is wanted
    save: bool  #: whether something may be saved for the backward pass
    call: str  #: the public function's name, and more on which all ranks must agree
    group: str  #: its name, "" for this process alone
    settings: Sequence[int]  #: of the call, see `settings.Settings`

    @property
    def columns(self) -> Tensor:
        """The features of the columns."""
        return self.x if self.y is None else self.y

    @property
    def numbers(self) -> states.Numbers:
        """How many numbers the reduction keeps of a row."""
        if self.teacher_scale is not None:
            return states.TARGETS
        has_positives = self.row_ids is not None or self.diagonal == PAIRED
        return states.SPLIT if has_positives else states.NEGATIVES


def make_operands(*tensors: Any, cols: bool, group: object, call: str, width: int = 0) -> Operands:
    """Operands, from the tensors and the diagonal on with what the call's surroundings say."""
    x, y, scale, *_ = tensors
    backends.warn_of_float32(x)
    grad, name = torch.is_grad_enabled(), group_name(group)
    needs = [grad and t is not None and t.requires_grad for t in (x, y, scale)]
    # Nothing is saved under torch.func, which may hold any number of calls' logits.
    save = any(needs) and (torch.compiler.is_compiling() or not transforms_active())
    if name:
        wanted = ", ".join(compress(("x", "y", "scale"), needs)) or "none"
        call = f"{call}, gradients wanted: {wanted}"
    plain: tuple[Any, ...] = width, cols, save, call, name, settings.of_call(x)
    return Operands(*tensors, *plain)


class Results(NamedTuple):
    """Results of the forward operator."""

    rows: Tensor  #: as of `Stacks`
    columns: Tensor  #: likewise; empty if they are not wanted
    sizes: Tensor  #: of all ranks, see `schedule.new_sizes`
    saved: Tensor  #: the first blocks' logits, or in a group all ranks' columns


def _forward(*flat: Any) -> Results:
    o = Operands(*flat)
    with applied(o.settings, o.x), torch.cuda.device_of(o.x):
        own_sizes, terms = (o.x.shape[0], o.columns.shape[0]), _terms(o) if o.group else ""
        ranks, sizes = schedule.agree(o.group, o.call, terms, own_sizes, o.columns, o.y is None)
        saved = _new_saved(o, sizes.shape[1])
        if ranks is not None:
            ranks.keep(saved, filled=False)
        sweep = _sweep(o, ranks, saved)
        tiles = sweep.make(sweep.matrix)
        columns = None
        if ranks is not None:
            rows, columns = reduce(sweep, tiles, o.cols)
        else:
            row_state = tiles.new_state(tiles.m)
            col_state = tiles.new_state(tiles.n) if o.cols else None
            tiles.forward(row_state, col_state, (True, True), to_results=True)
            rows = tiles.results(row_state)
            columns = None if col_state is None else tiles.results(col_state)
        return Results(*in_given_order(rows, columns, sweep.orders), sizes, saved)


def _forward_fake(*flat: Any) -> Results:
    o = Operands(*flat)
    rows = states.empty(o.numbers.results, o.x.shape[0], o.x)
    columns = rows.new_empty(0)
    if o.cols:
        columns = states.empty(o.numbers.results, o.columns.shape[0], o.x)
    sizes = schedule.new_sizes(o.group, o.x)
    return Results(rows, columns, sizes, _new_saved(o, sizes.shape[1]))


def _backward(*flat: Any) -> tuple[Tensor, ...]:
    o, results, (row_gradient, col_gradient), need = logsumexps.split(flat)
    if o.group:  # other ranks wait for this one's part, whether or not its own loss used it
        if row_gradient is None:
            row_gradient = torch.zeros_like(results.rows)
        if o.cols and col_gradient is None:
            col_gradient = torch.zeros_like(results.columns)
    upstream = row_gradient, col_gradient if o.cols else None
    with applied(o.settings, o.x), torch.cuda.device_of(o.x):
        ranks = schedule.ranks_again(o.group, o.call, results.sizes, o.columns, o.y is None)
        if ranks is not None:
            ranks.keep(results.saved, filled=True)
        return gradients(_sweep(o, ranks, results.saved), o.scale, results[:2], upstream, need)


logsumexps = Reduction(
    "logsumexps",
    Operands,
    Results,
    (_forward, _forward_fake, _backward),
    wanted=3,
    outputs=2,
)


def _terms(o: Operands) -> str:
    """Description of the call, on which all ranks must agree."""
    return (
        f"{'x against itself' if o.y is None else 'x against y'}, {backends.described(o.x)}, "
        f"sides: {'both' if o.cols or o.y is None else 'rows'}, "
        f"ids: {'none' if o.row_ids is None else 'given'}, diagonal: {o.diagonal}, "
        f"ceiling: {'none' if o.ceiling is None else 'given'}, "
        f"bias: {'given' if o.width else 'none'}, "
        f"lengths: {'none' if o.col_lengths is None else 'given'}, "
        f"{'guide' if o.teacher_scale is None else 'teacher'}: "
        f"{'none' if o.guide_y is None else backends.described(o.guide_y)}"
    )


def _new_saved(o: Operands, ranks: int) -> Tensor:
    """An empty tensor for what is saved for the backward pass; ranks: of the group, 0 alone.

    The shape must be known without the other ranks, so the tensor may remain unused: see
    `Ranks.keep`.
    """
    limits, columns = settings.Settings(*o.settings), o.columns
    tokens = o.x.dim() == 3  # those of all ranks would take too much
    if not o.save or o.teacher_scale is not None or (tokens and ranks):
        return o.x.new_empty(0)
    if ranks == 0:
        count = maxsim_tiles(o.x).saved_numbers if tokens else saved_logits
        size = count(o.x, columns, limits.workspace)
        return o.x.new_empty(size, dtype=accumulator_dtype(o.x.dtype))
    rows = schedule.saved_rows(columns, ranks, limits.gather)
    return columns.new_empty(rows, columns.shape[1])


def saved_logits(x: Tensor, y: Tensor, limit: int) -> int:
    """Number of logits saved for the backward pass: as many as fit next to a block.

    Both passes must have this workspace, of `limit` bytes, as it decides the shape of blocks. Only
    the CPU saves logits, where blocks take little of the workspace.
    """
    if x.device.type != "cpu":
        return 0
    left = limit - eager.block_bytes(*eager.block_shape(x, limit), x)
    return max(0, min(left // accumulator_dtype(x.dtype).itemsize, x.shape[0] * y.shape[0]))


def _sweep(o: Operands, ranks: Ranks | None, saved: Tensor) -> Sweep:
    """The matrix, for the kernels in the order of its ids, and its tiles."""
    rows = Side(o.x, o.row_ids, o.ceiling, o.row_weight, o.guide_x)
    cols = rows
    if o.y is not None:
        cols = Side(o.y, o.col_ids, guide=o.guide_y, lengths=o.col_lengths)
    # Each rank sorts its own shard, so that its pairs (i, i) stay on the diagonal.
    start = 0 if ranks is None else ranks.start
    matrix, orders = Matrix(rows, cols, o.diagonal, start, start, o.y is None, o.width), Orders()
    if o.x.dim() == 3:
        options = {"scale": o.scale, "saved": saved if ranks is None else saved[:0]}
        return Sweep(matrix, orders, partial(maxsim_tiles(o.x), **options), ranks)
    tiles: Any = SoftmaxTiles if o.teacher_scale is None else SoftTargetTiles
    options = {"scale": o.scale}
    if o.teacher_scale is not None:
        options["teacher_scale"] = o.teacher_scale
    if all(backends.uses_kernels(t) for t in (o.x, o.guide_x, o.guide_y) if t is not None):
        matrix, orders = sort_by_id(matrix)
        tiles = _kernel_tiles(o)
    elif o.teacher_scale is None:
        options["saved"] = saved if ranks is None else saved[:0]
    return Sweep(matrix, orders, partial(tiles, **options), ranks)


def maxsim_tiles(x: Tensor) -> Any:
    """Tiles of late interaction; the kernels take 16-bit features of up to `WIDEST` numbers."""
    if not (backends.uses_kernels(x) and x.element_size() == 2 and x.shape[2] <= WIDEST):
        return MaxSimTiles
    from megabatch.similarity.triton.maxsim import MaxSimKernelTiles

    return MaxSimKernelTiles


def _kernel_tiles(o: Operands) -> Any:
    if o.teacher_scale is not None:
        from megabatch.similarity.triton.soft_targets import SoftTargetKernelTiles

        return SoftTargetKernelTiles
    from megabatch.similarity.triton.softmax import SoftmaxKernelTiles

    return SoftmaxKernelTiles
