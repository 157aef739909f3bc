"""The exact stream: a shuffled sequence of packed rows that stops and goes on anywhere.

Rows of data are dealt to V virtual shards, which depend on nothing but the config: shard v takes the rows v, v + V,
v + 2V, ... of the shuffled order and packs them by itself. Row r of every step is the next row of shard r mod V.
Processes and workers take whole shards, so neither their number nor the mesh changes a row.

Every epoch of the order holds each row of data once, in a new order. Shards fill rows at their own pace, so at one step
some may be in the next epoch already.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from omnijax.data.documents import Documents, Table
from omnijax.data.items import Items, TextItems
from omnijax.data.mixture import Deal
from omnijax.data.omni_packing import measure
from omnijax.data.order import Order
from omnijax.data.packing import ConcatenateAndSplit, Rows
from omnijax.data.shards import Pipeline, ShardState, Step, first_state, make_steps
from omnijax.data.tokenizer import Tokenizer
from omnijax.data.workers import steps_of_workers
from omnijax.errors import BadRow, UserError


def document_order(count: int, seed: int) -> Order:
    """The endless order of the documents of a stream of one source."""
    return Order(count, seed)


def content_fingerprint(rows: Table[Any, Any]) -> str:
    """Differs where up to 64 rows, spread evenly over all, differ.

    A corpus that was replaced is noticed; one that was edited here and there may not be. A row that cannot be read
    counts as such: it is refused when its turn comes.
    """
    digest, last = hashlib.sha256(), len(rows) - 1
    for index in sorted({number * last // 63 for number in range(64)}):
        try:
            row = rows[index]
        except UserError:
            row = "unreadable"
        digest.update((row if isinstance(row, str) else repr(row)).encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:16]


class ExactStream(Iterator[Rows]):
    """Packed rows; `next(stream)` gives the `Rows` of a step, arrays [rows, ...].

    It ends where every shard held here has: those that end sooner give rows of padding.

    Args:
        workers: processes that make the rows, each of whole shards; 0: this one does.
        prefetch: steps that each worker is ahead.
        held: the shards this process makes, all by default; a step then has the rows r with r mod V in `held`.
        report: a file for the bad rows passed by, a line of JSON each, with the number of the step, from 1.

    Raises `UserError` for arguments outside their bounds and for a member without a single token; while it runs, what
    reading rows raises, and `UserError` once more rows are bad than the pipeline allows. `close` ends its workers.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        workers: int = 0,
        prefetch: int = 2,
        held: Sequence[int] | None = None,
        report: Path | None = None,
    ):
        deal = pipeline.deal
        held = range(deal.shards) if held is None else sorted(set(held))
        if not held or held[0] < 0 or held[-1] >= deal.shards:
            raise UserError(f"held shards are {list(held)}: name one or more of 0..{deal.shards - 1}")
        if not 0 <= workers <= len(held) or prefetch < 1:
            raise UserError(
                f"{workers} workers with prefetch {prefetch} for {len(held)} shards: give at most {len(held)} workers, "
                "as each makes whole shards, and prefetch at least 1"
            )
        self._pipeline, self._workers, self._prefetch, self._report = pipeline, workers, prefetch, report
        self._states = {shard: first_state(deal, shard) for shard in held}
        self._steps: Generator[Step, None, None] | None = None
        for items, name in zip(pipeline.items, deal.names, strict=True):
            _require_tokens(items, f" of {name!r}" if len(deal.names) > 1 else "", pipeline.bad_row_limit)
        self._stream = _describe(pipeline)

    def __next__(self) -> Rows:
        if self._steps is None:
            self._steps = self._start()
        try:
            step = next(self._steps)
            self._count_bad(step)
        except BaseException:
            self.close()  # the next one begins anew where the last one ended
            raise
        if not any(step.rows.row_ids):
            raise StopIteration
        self._states = step.states
        return replace(step.rows, state=self.state(), metrics=self._metrics(step))

    def state(self) -> dict[str, Any]:
        """JSON to go on from after the rows returned so far.

        Where rows are fetched ahead of the step, save the `state` of the last `Rows` consumed instead.
        """
        return {"stream": dict(self._stream), "shards": {str(v): state.to_json() for v, state in self._states.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`: the same rows as if the stream had never stopped.

        `workers`, `held`, the rows of a step, and weights and epochs of a mixture may differ from the run that saved
        it. Raises `UserError`, and changes nothing, where anything else that decides a shard's rows differs or a held
        shard is missing.
        """
        _require_same_stream(state, self._stream, "this run")
        missing = [shard for shard in self._states if str(shard) not in state["shards"]]
        if missing:
            raise UserError(f"the data state lacks the shards {missing}: merge the states of all processes first")
        self.close()
        self._states = {shard: ShardState.from_json(state["shards"][str(shard)]) for shard in self._states}

    def close(self) -> None:
        """End the workers. The stream can still go on, with new ones."""
        if self._steps is not None:
            self._steps.close()
        self._steps = None

    def _metrics(self, step: Step) -> dict[str, float]:
        """Counts since the first step; how full its rows are; what part of its tokens each member of a mixture has."""
        metrics: dict[str, float] = {}
        if self._pipeline.bad_row_limit is not None:
            metrics["bad_rows"] = _bad(step.states)
        counts = sum((Counter(state.packer.get("counts", {})) for state in step.states.values()), Counter())
        metrics |= {name if "/" in name else f"packing/{name}": count for name, count in counts.items()}
        names, arrays = self._pipeline.deal.names, step.rows.arrays
        metrics |= measure(arrays)
        if len(names) > 1:
            tokens = np.bincount(arrays["sources"][arrays["segment_ids"] > 0], minlength=len(names))
            metrics |= {f"share/{name}": float(count / tokens.sum()) for name, count in zip(names, tokens, strict=True)}
        return metrics

    def _start(self) -> Generator[Step, None, None]:
        if self._report is not None:
            _forget_after(self._report, _steps_done(self._states))
        if self._workers:
            return steps_of_workers(self._pipeline, self._states, self._workers, self._prefetch)
        return make_steps(self._pipeline, self._states)

    def _count_bad(self, step: Step) -> None:
        """Report the rows that were passed by; raises `UserError` if they are too many."""
        skipped = [error for errors in step.skipped for error in errors]
        if not skipped:
            return
        if self._report is not None:
            with self._report.open("a", encoding="utf-8") as file:
                for error in skipped:
                    line = {"step": _steps_done(step.states), "row": str(error.row), "reason": error.reason}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
        count, limit = _bad(step.states), self._pipeline.bad_row_limit
        if limit is not None and count > limit:
            where = f"; all are in {self._report}" if self._report else ""
            raise UserError(
                f"{count} rows of data could not be used, and at most {limit} may be: mend them or raise the limit"
                f"{where}; the last one: {skipped[-1]}"
            )


class Stream(ExactStream):
    """The exact stream of the texts of one table, as rows of `length` tokens; it never ends.

    Args:
        documents: the texts, in their own order.
        length: S, the tokens of a row; at least 2, so that no row is without a target.
        rows: rows of the global batch; a multiple of `shards`.
        shards: V, the virtual shards; at most the number of documents.
        seed: of the order, 0 to 2**32 - 1.
        source: the number written into `sources`.
        held: as in `ExactStream`.
    """

    def __init__(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        *,
        length: int,
        rows: int,
        shards: int,
        seed: int,
        source: int = 0,
        held: Sequence[int] | None = None,
    ):
        items = TextItems(documents, tokenizer, source)
        deal = Deal((len(documents),), shards, seed)
        super().__init__(Pipeline((items,), deal, ConcatenateAndSplit(length), rows), held=held)


def with_last(stream: Iterator[Rows]) -> Iterator[tuple[Rows, bool]]:
    """The rows of step after step, and whether they are the last ones.

    What goes wrong with the next ones, which it reads to know that, is raised after these.
    """
    rows = next(stream, None)
    while rows is not None:
        following, error = None, None
        try:
            following = next(stream, None)
        except Exception as raised:
            error = raised
        yield rows, following is None and error is None
        if error is not None:
            raise error
        rows = following


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state from those of all processes (one or more), for any number of processes to restore from.

    Raises `UserError` where they are not states of one stream.
    """
    for state in states:
        _require_same_stream(state, states[0].get("stream", {}), "another process")
    return {**states[0], "shards": {shard: at for state in states for shard, at in state["shards"].items()}}


def _describe(pipeline: Pipeline) -> dict[str, Any]:
    """What has to be the same for the rows to go on exactly, as JSON."""
    deal, packer = pipeline.deal, pipeline.packer
    settings = [json.loads(json.dumps(items.settings())) for items in pipeline.items]
    contents = "".join(content_fingerprint(items.rows) for items in pipeline.items)
    return {
        "documents": sum(deal.sizes),
        "seed": deal.seed,
        "shards": deal.shards,
        "packing": type(packer).__name__,
        **json.loads(json.dumps(asdict(packer))),  # type: ignore[call-overload]
        **(settings[0] if settings.count(settings[0]) == len(settings) else {"settings": settings}),
        "members": list(deal.names),
        "by": deal.by,
        "content": hashlib.sha256(contents.encode()).hexdigest()[:16],
        # The seed does not imply it: another version that shuffles otherwise would go on in another order.
        "order": [deal.orders()[0][number] for number in range(8)],
    }


def _require_same_stream(state: dict[str, Any], stream: Mapping[str, Any], whose: str) -> None:
    if not isinstance(state, dict) or set(state) != {"stream", "shards"}:
        raise UserError("the data state is not one that a stream gave: it must hold 'stream' and 'shards'")
    for name, saved, value in _differences("", state["stream"], stream):
        raise UserError(
            f"the data state has {name} {saved!r}, {whose} has {value!r}: they must agree to go on exactly; "
            f"bring {name} back or start the data anew"
        )


def _differences(name: str, saved: Any, value: Any) -> Iterator[tuple[str, Any, Any]]:
    """The innermost settings that differ, each by its path."""
    if isinstance(saved, Mapping) and isinstance(value, Mapping):
        for key in {**value, **saved}:
            yield from _differences(f"{name}.{key}" if name else key, saved.get(key), value.get(key))
    elif saved != value:
        yield name, saved, value


def _require_tokens(items: Items, name: str, limit: int | None) -> None:
    """One item with a token is enough for every shard to fill its rows in the end; ordinarily it is the first."""
    bad = 0
    for index in range(len(items)):
        try:
            if items[index].tokens.size:
                return
        except BadRow:
            bad += 1
            if limit is None or bad > limit:
                raise
    raise UserError(f"none of the {len(items)} documents{name} has a token: give documents with text")


def _bad(states: Mapping[int, ShardState]) -> int:
    return sum(state.bad for state in states.values())


def _steps_done(states: Mapping[int, ShardState]) -> int:
    return max(state.step for state in states.values())


def _forget_after(report: Path, step: int) -> None:
    """Drop the lines of later steps, of a run that died after its last checkpoint."""
    if report.exists():
        lines = report.read_text("utf-8").splitlines(keepends=True)
        report.write_text("".join(line for line in lines if json.loads(line)["step"] <= step), "utf-8")
