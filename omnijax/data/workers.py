"""Worker processes: each makes the rows of whole shards, some steps ahead, and hands them over in shared memory.

A worker is a fresh interpreter that runs `serve`: not a fork, which jax's threads do not survive, and not one of
`multiprocessing`, which would import the main program and jax with it. It makes a step when it is asked to, so rows and
their states do not depend on how far ahead it is. It ends when its pipe does: with the process that began it.
"""

import mmap
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np

from omnijax.data.packing import Rows
from omnijax.data.shards import Pipeline, ShardState, Step, make_steps
from omnijax.errors import BadRow, UserError

GONE = (EOFError, ConnectionError)
"""What a pipe raises whose other end is no more."""


def steps_of_workers(
    pipeline: Pipeline, states: Mapping[int, ShardState], workers: int, prefetch: int
) -> Generator[Step, None, None]:
    """`make_steps`, by so many workers, at most one for each shard; each is up to `prefetch` steps ahead.

    Closing the generator ends them. An error in a worker is raised here as it was there, when its step is due. Raises
    `UserError` where the pipeline cannot be sent to a worker, and where one was killed.
    """
    shards = list(states)
    groups = [shards[number::workers] for number in range(workers)]
    place = {row: number for number, row in enumerate(pipeline.rows_of(shards))}
    places = [[place[row] for row in pipeline.rows_of(group)] for group in groups]
    team: list[Worker] = []
    try:
        for _ in groups:
            team.append(Worker())
        for worker, group in zip(team, groups, strict=True):
            worker.begin(pipeline, {shard: states[shard] for shard in group}, prefetch)
        while True:
            step = _together([worker.receive() for worker in team], places)
            for worker in team:
                worker.ask()  # only now: it may use the memory of the step again
            yield step
    finally:
        for worker in team:
            worker.end()


@dataclass(frozen=True)
class Failure:
    """What a worker sends in place of a step."""

    error: Exception
    traceback: str


@dataclass(frozen=True)
class Message:
    """A pickled step, and the first byte and the size of each of its arrays in the shared memory.

    Where they have no place there, they are in `content`, and `spans` is None.
    """

    content: bytes
    spans: list[tuple[int, int]] | None


class Worker:
    """One process that runs `serve`, seen from the one that begins it."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        self._file, self._memory = _anonymous_file(), memoryview(b"")
        handles = theirs.fileno(), self._file
        code = f"import sys; sys.path[:] = {sys.path!r}; from omnijax.data.workers import serve; serve{handles}"
        # In a process group of its own, so that ctrl-C reaches only us, who then close its pipe.
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=handles, process_group=0
        )
        theirs.close()

    def begin(self, pipeline: Pipeline, states: Mapping[int, ShardState], prefetch: int) -> None:
        try:
            task = pickle.dumps((pipeline, states, prefetch))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise _unsendable(error) from error
        with suppress(*GONE):  # `receive` says so
            self._pipe.send_bytes(task)
        for _ in range(prefetch):
            self.ask()

    def ask(self) -> None:
        """Have it make one more step."""
        with suppress(*GONE):
            self._pipe.send(None)

    def receive(self) -> Step:
        """The next step; its arrays are as they are until one more is asked for."""
        try:
            reply: Message | Failure = self._pipe.recv()
        except GONE as error:
            code = self._process.wait()
            raise UserError(
                f"a data worker ended with code {code}: it may have been out of memory (lower workers or prefetch), "
                "or a decoder crashed (find the row with workers 0)"
            ) from error
        if isinstance(reply, Failure):
            if not isinstance(reply.error, UserError):
                reply.error.add_note(f"In a data worker:\n{reply.traceback}")
            raise reply.error
        if reply.spans is None:
            return pickle.loads(reply.content)
        if not self._memory:
            self._memory = memoryview(mmap.mmap(self._file, 0))
        return pickle.loads(reply.content, buffers=[self._memory[first : first + size] for first, size in reply.spans])

    def end(self) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.wait()
        os.close(self._file)


def serve(pipe: int, file: int) -> None:
    """Make steps for the process at the other end of a pipe, one whenever it asks, until it is gone."""
    with Connection(pipe) as connection, suppress(*GONE):
        replies = _replies(connection.recv_bytes(), file)
        while True:
            connection.recv()
            if (reply := next(replies, None)) is None:  # the last one was a failure
                return
            connection.send(reply)


def _replies(task: bytes, file: int) -> Generator[Message | Failure, None, None]:
    try:
        pipeline, states, slots = pickle.loads(task)
    except Exception as error:
        yield Failure(_unsendable(error), "")
        return
    try:
        memory = None
        for number, step in enumerate(make_steps(pipeline, states)):
            buffers: list[pickle.PickleBuffer] = []
            content = pickle.dumps(step, protocol=5, buffer_callback=buffers.append)
            arrays = [buffer.raw() for buffer in buffers]
            size = sum(_aligned(array.nbytes) for array in arrays)
            if memory is None:
                slot = max(size, mmap.PAGESIZE)
                os.ftruncate(file, slots * slot)
                memory = mmap.mmap(file, slots * slot)
            if size > slot:
                yield Message(pickle.dumps(step), None)
                continue
            first, spans = number % slots * slot, []
            for array in arrays:
                memory[first : first + array.nbytes] = array
                spans.append((first, array.nbytes))
                first += _aligned(array.nbytes)
            yield Message(content, spans)
    except Exception as error:
        yield Failure(_sendable(error), traceback.format_exc())


def _anonymous_file() -> int:
    """A file in memory without a name: it is gone when no process has it."""
    if sys.platform == "linux":
        return os.memfd_create("omnijax-rows")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error of a library may be anything
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _unsendable(error: Exception) -> UserError:
    reason = " ".join(str(error).split())
    return UserError(
        f"the data cannot be sent to a worker ({reason}): define its classes in a module, or set workers to 0"
    )


def _together(parts: Sequence[Step], places: Sequence[Sequence[int]]) -> Step:
    """One step of those of all workers, each row at its place."""
    count = sum(map(len, places))
    arrays: dict[str, Any] = {
        name: np.empty((count, *array.shape[1:]), array.dtype) for name, array in parts[0].rows.arrays.items()
    }
    row_ids: list[tuple[str, ...]] = [()] * count
    skipped: list[tuple[BadRow, ...]] = [()] * count
    for part, at in zip(parts, places, strict=True):
        for name, array in part.rows.arrays.items():
            arrays[name][at] = array
        for place, ids, errors in zip(at, part.rows.row_ids, part.skipped, strict=True):
            row_ids[place], skipped[place] = ids, errors
    states = {shard: state for part in parts for shard, state in part.states.items()}
    return Step(Rows(arrays, tuple(row_ids)), tuple(skipped), states)
