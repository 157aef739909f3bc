"""Every setting of a run, as one tree of frozen dataclasses; gin files bind nothing else.

`python -m omnijax.train FILE.gin Mesh.tensor=2` overrides any field by a unique suffix of its name.
"""

import contextlib
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from omnijax import ginfile
from omnijax.data.chat_source import has_chat, processors_of
from omnijax.data.mixture import Mixture, members_of, source_names
from omnijax.data.processing import Processor
from omnijax.data.sources import Source
from omnijax.data.tokenizer import Tokenizer
from omnijax.errors import UserError
from omnijax.fields import ranged
from omnijax.nn.remat import Remat
from omnijax.nn.router import RouterLoss
from omnijax.objectives import TextLoss
from omnijax.sharding import Rules


@dataclass(frozen=True)
class Run:
    """What to run and where its results go.

    dir:           the run folder; made if missing
    steps:         optimizer steps in all, resumed ones included; learning-rate schedules span all of them
    start:         folder whose weights the run begins with: of Hugging Face, of another run, or imported
    resume:        go on from the newest checkpoint of `dir` if there is one; False refuses a folder that holds one
    profile:       (first, last) step of a `jax.profiler` trace, or None
    compile_cache: folder that keeps compiled programs between runs; "" turns it off
    peak_tflops:   bf16 peak of one device, for MFU on hardware the built-in list lacks
    """

    dir: str
    steps: int = ranged(at_least=1)
    seed: int = ranged(0, at_least=0)
    start: str | None = None
    resume: bool = True
    profile: tuple[int, int] | None = ranged(None, at_least=1)
    compile_cache: str = "~/.cache/omnijax/xla"
    peak_tflops: float | None = ranged(None, above=0.0)


@dataclass(frozen=True)
class Mesh:
    """Sizes of the mesh axes; one may be -1, which takes all devices that are left."""

    replica: int = ranged(1, at_least=-1)
    data: int = ranged(-1, at_least=-1)
    expert: int = ranged(1, at_least=-1)
    sequence: int = ranged(1, at_least=-1)
    tensor: int = ranged(1, at_least=-1)


@dataclass(frozen=True)
class Data:
    """Text and chats, packed into rows.

    source:   one source, or a mixture of several; a `Chat` among them has whole samples packed, text split as needed
    length:   tokens of a row
    rows:     rows of the global batch of one step
    shards:   virtual shards of the stream (None: `rows`); the rows depend on it, never on processes or meshes
    holdout:  share of the documents, from the end of each source, kept for evaluation; 0 for none
    workers:  processes that make the rows, each of whole shards; 0: the one that trains does
    prefetch: steps that workers are ahead
    bad_rows: at a row of data that cannot be used, `raise` stops; `skip` passes it by, counts it and names it in
              bad_rows.jsonl of the run folder
    bad_row_limit: how many may be passed by in all
    units:    of each modality that a `Chat.processor` makes, such as {"image": 4096}: units of a row;
              `python -m omnijax.inspect --data CONFIG` proposes some
    over_length: what becomes of a chat longer than a row, or with more units than one: `raise` stops, `drop` leaves it
              out, `cut` leaves out its last turns; what is left out is counted
    look_ahead: how many chats wait for the row that they fit best
    """

    source: Source | Mixture
    tokenizer: Tokenizer
    length: int = ranged(at_least=2)
    rows: int = ranged(at_least=1)
    shards: int | None = ranged(None, at_least=1)
    holdout: float = ranged(0.0, at_least=0.0, below=1.0)
    workers: int = ranged(0, at_least=0)
    prefetch: int = ranged(2, at_least=1)
    bad_rows: Literal["raise", "skip"] = "raise"
    bad_row_limit: int = ranged(100, at_least=0)
    units: Mapping[str, int] = field(default_factory=dict, metadata={"at_least": 1})
    over_length: Literal["raise", "drop", "cut"] = "raise"
    look_ahead: int = ranged(64, at_least=1)


@dataclass(frozen=True)
class Optimizer:
    """AdamW and its learning-rate schedule; see `omnijax.optim`."""

    learning_rate: float = ranged(above=0.0)
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: int = ranged(0, at_least=0)
    decay_fraction: float = ranged(0.2, above=0.0, at_most=1.0)
    final_fraction: float = ranged(0.1, at_least=0.0, at_most=1.0)
    b1: float = ranged(0.9, at_least=0.0, below=1.0)
    b2: float = ranged(0.95, at_least=0.0, below=1.0)
    eps: float = ranged(1e-8, above=0.0)
    weight_decay: float = ranged(0.1, at_least=0.0)
    decay_embeddings: bool = False
    clip_norm: float | None = ranged(1.0, above=0.0)


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters: a kernel W that has one acts as W + s A B, of which A and B are trained (arXiv 2106.09685).

    patterns: which kernels have one, of linear maps and of experts; what else a pattern names has none
    rank:     the width between A and B
    alpha:    s is alpha / rank, or alpha / sqrt(rank) where `rslora` is set (arXiv 2312.03732)
    dropout:  share of what goes into A that is left out in training; experts have none
    """

    patterns: tuple[str, ...]
    rank: int = ranged(16, at_least=1)
    alpha: float = ranged(32.0, above=0.0)
    rslora: bool = False
    dropout: float = ranged(0.0, at_least=0.0, below=1.0)

    def scale(self) -> float:
        """s."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True)
class Tune:
    """Which parameters are trained, by patterns as `omnijax.patterns` explains them; all are, if nothing is said.

    freeze: what stays as it is
    lora:   adapters, which alone are trained
    train:  what is trained besides, although it is named by `freeze`, or there are adapters
    rates:  pattern -> factor of the learning rate; the last pattern that names a parameter counts
    """

    freeze: tuple[str, ...] = ()
    lora: Lora | None = None
    train: tuple[str, ...] = ()
    rates: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.train and not self.freeze and self.lora is None:
            raise UserError(f"Tune.train = {self.train} says what is trained of what is frozen; set Tune.freeze too")
        if self.freeze and self.lora is not None:
            raise UserError(
                f"Tune.freeze = {self.freeze} adds nothing to Tune.lora, which freezes all but adapters; leave it out"
            )
        for pattern, factor in self.rates.items():
            if not 0 < factor < math.inf:
                raise UserError(f"Tune.rates: {pattern!r}: {factor} must be a positive number; for 0 use Tune.freeze")


@dataclass(frozen=True)
class Compute:
    """How a step is computed; nothing here changes what is computed beyond rounding.

    dtype:        of activations and of the weights' copies; parameters and optimizer stay float32
    attention:    kernel; `auto` picks one for the hardware
    experts:      kernel of mixtures of experts, one of `omnijax.nn.experts`; `auto` is blocks
    remat:        what the backward pass recomputes
    accumulation: micro-batches of a step
    vocab_multiple: the vocabulary is filled up to a multiple of it inside, so that `tensor` may split any vocabulary
    splits:       layers at which a stack of the language model begins anew, so that a part of them can be frozen
    """

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    attention: Literal["auto", "blockwise", "cudnn", "reference", "tokamax"] = "auto"
    experts: Literal["auto", "blocks", "ragged", "tokamax"] = "auto"
    remat: Remat = "full"
    accumulation: int = ranged(1, at_least=1)
    vocab_multiple: int = ranged(1, at_least=1)
    splits: tuple[int, ...] = ranged((), at_least=1)


@dataclass(frozen=True)
class Evaluation:
    """Held-out loss every `every` steps and at the end; 0 turns it off.

    answers: about how many of the held-out chats are answered at the end, and their answers compared, word for word;
        with pictures among them, some are drawn
    ngrams: orders of the n-gram models (add-0.1 smoothing) whose held-out bits are printed as a yardstick
    """

    every: int = ranged(0, at_least=0)
    ngrams: tuple[int, ...] = ()
    answers: int = ranged(0, at_least=0)


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoints every `every` steps (0: none but the last), the newest `keep` kept."""

    every: int = ranged(0, at_least=0)
    keep: int = ranged(2, at_least=1)


@dataclass(frozen=True)
class Sample:
    """The continuation a run ends with; no prompt, no sample."""

    prompt: str = ""
    tokens: int = ranged(200, at_least=1)
    temperature: float = ranged(0.8, at_least=0.0)


@dataclass(frozen=True)
class Train:
    """The root of a config. `model` is a model config (`models.*`), `rules` a table (`sharding_rules.*`).

    `router` says what keeps the load of a model's experts even, if not the default.
    """

    run: Run
    model: Any
    rules: Rules
    data: Data
    optimizer: Optimizer
    mesh: Mesh = field(default_factory=Mesh)
    loss: TextLoss = field(default_factory=TextLoss)
    router: RouterLoss | None = None
    tune: Tune = field(default_factory=Tune)
    compute: Compute = field(default_factory=Compute)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    sample: Sample = field(default_factory=Sample)

    def __post_init__(self) -> None:
        if self.data.rows % self.compute.accumulation:
            raise UserError(
                f"Compute.accumulation = {self.compute.accumulation} does not divide Data.rows = {self.data.rows}; "
                f"change one of them"
            )
        if self.router is not None and self.router.balance == "per_batch" and self.compute.accumulation > 1:
            raise UserError(
                f"RouterLoss.balance = 'per_batch' is no sum over the {self.compute.accumulation} micro-batches of a "
                f"step; take 'per_row', whose loss no accumulation changes, or ask for 'per_micro_batch'"
            )
        if self.evaluation.every and not self.data.holdout:
            raise UserError(
                f"Evaluation.every = {self.evaluation.every} needs held-out text; set Data.holdout, e.g. 0.05"
            )
        if self.evaluation.ngrams and self.data.bad_rows == "skip":
            raise UserError(
                f"Evaluation.ngrams = {self.evaluation.ngrams} counts every row, and Data.bad_rows is 'skip'; "
                f"leave the n-grams out, or set bad_rows to 'raise'"
            )
        chats = [has_chat(member.source) for member in members_of(self.data.source)]
        if self.evaluation.ngrams and all(chats):
            raise UserError(
                f"Evaluation.ngrams = {self.evaluation.ngrams} counts text, and Data.source has only chats; leave it "
                f"out"
            )
        if self.evaluation.answers and not (any(chats) and self.evaluation.every):
            raise UserError(
                f"Evaluation.answers = {self.evaluation.answers} needs chats that are held out: give Data.source some, "
                f"and set Evaluation.every and Data.holdout, or leave it out"
            )
        if not callable(getattr(self.model, "build", None)):
            raise UserError(f"Train.model = {self.model!r} is not a model config, e.g. @qwen3.Qwen3Config()")
        if self.sample.prompt and not len(self.data.tokenizer.encode(self.sample.prompt)):
            raise UserError(f"Sample.prompt = {self.sample.prompt!r} has no token; write another")
        if self.data.tokenizer.vocab_size > self.model.vocab_size:
            raise UserError(
                f"the tokenizer has {self.data.tokenizer.vocab_size} ids, the model a vocabulary of "
                f"{self.model.vocab_size}; raise the model's vocab_size, or take the tokenizer that belongs to it"
            )

        for processor in processors_of(self.data.source):
            self._check_processor(processor)

    def _check_processor(self, processor: Processor) -> None:
        """Raises `UserError` where the model does not read what the processor makes."""
        name, model, read = type(processor).__name__, type(self.model).__name__, getattr(self.model, "units", {})
        for modality, unit in processor.units.items():
            if modality not in read:
                raise UserError(
                    f"Chat.processor = {name} makes units of {modality!r}, and the model, {model}, reads "
                    f"{', '.join(read) or 'only text'}: take a model that reads them, or leave the processor out"
                )
            if unit != read[modality]:
                raise UserError(
                    f"Chat.processor = {name} makes {modality} units {unit}, and the model, {model}, reads "
                    f"{read[modality]}: give the processor the sizes of the model's config"
                )
        processor.check(self.data.tokenizer, self.model)

    def model_options(self) -> dict[str, Any]:
        """What `model.build` takes beside the model config."""
        options: dict[str, Any] = {
            "remat": self.compute.remat,
            "loss": self.loss,
            "vocab_multiple": self.compute.vocab_multiple,
            "sources": len(source_names(self.data.source)) or 1,
        }
        if self.compute.splits:
            options["splits"] = self.compute.splits
        return options if self.router is None else options | {"router_loss": self.router}


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Train:
    """The settings of a gin file, with `Section.field=value` overrides; `UserError` for every mistake in them."""
    return ginfile.load(path, overrides, root=Train).value


def config_of_run(text: str, started_in: str | None) -> Train:
    """The settings of a run, from the resolved gin file and the working directory that its checkpoint keeps.

    Relative paths in them start there, or here where that folder is no more. Raises `UserError`, with the place.
    """
    place = started_in if started_in and os.path.isdir(started_in) else os.getcwd()
    gone = f"; the run was started in {started_in}, which is not here" if started_in not in (None, place) else ""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(place):
        path = os.path.join(folder, "config.gin")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        try:
            return load_config(path)
        except UserError as error:
            message = str(error).replace(path, "config.gin")
            raise UserError(f"{message}; relative paths were looked up in {place}{gone}") from error
