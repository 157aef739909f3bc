"""Train a model: `python -m omnijax.train CONFIG.gin [Name.field=value ...]`.

Read it top to bottom; every piece is a public function that a notebook can call.
"""

import contextlib
import difflib
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from omnijax import checkpoint, commands, config, flops, metrics, parameters, report, sharding, tune
from omnijax.answers import Answer, answer, answering
from omnijax.answers_picture import plot_answers
from omnijax.data import documents
from omnijax.data.evaluation import Evaluation
from omnijax.data.mixture import open_members, source_names
from omnijax.data.omni_packing import imbalance
from omnijax.data.pipeline import check_units, heldout_parts, make_items, make_pipeline, of_text
from omnijax.data.stream import ExactStream, with_last
from omnijax.errors import UserError
from omnijax.lock import only_run
from omnijax.mesh import make_mesh
from omnijax.nn.attention import chosen_kernel, use_kernel
from omnijax.nn.experts import chosen_grouped, use_grouped
from omnijax.optim import learning_rate, make_optimizer
from omnijax.sampling import sample
from omnijax.sharding import Rules, label
from omnijax.start import first_model
from omnijax.step import abstract_state, evaluation_step, init_state, put_batch, state_shardings, train_step
from omnijax.steplog import StepLog


def main() -> None:
    loaded = commands.settings_from_command_line("train")
    train(loaded.value, loaded.text)


def train(settings: config.Train, text: str) -> dict[str, float]:
    """Run `settings` to the end and return the last value of every metric; `text` is their resolved gin file."""
    run, data, compute = settings.run, settings.data, settings.compute
    say = print if jax.process_index() == 0 else (lambda *_: None)

    # --- Folder, compile cache, mesh ----------------------------------------------------------------------------
    folder = run_folder(run.dir)
    say(f"run folder: {folder.absolute()}\ncompile cache: {use_compile_cache(run.compile_cache)}")
    mesh = make_mesh(**vars(settings.mesh))
    say(f"mesh: {report.mesh_text(mesh)}")

    # --- Data ---------------------------------------------------------------------------------------------------
    texts, heldout_texts = open_members(data.source, data.holdout)
    report_file = folder / "bad_rows.jsonl" if jax.process_index() == 0 else None
    pipeline = make_pipeline(data, texts, run.seed)
    stream = ExactStream(pipeline, workers=data.workers, prefetch=data.prefetch, report=report_file)
    counts = [sum(map(len, tables)) for tables in (texts, heldout_texts)]
    say(f"data: {counts[0]} documents, {counts[1]} held out; {data.rows} x {data.length} tokens a step")
    heldout: dict[str, Evaluation] = {}
    yardsticks: dict[str, float] = {}
    if heldout_texts and settings.evaluation.every:
        heldout = heldout_parts(data, heldout_texts)
        for line in report.left_out(heldout.values()):
            say(line)
        if settings.evaluation.ngrams:
            trained, held = (documents.concatenate(of_text(data, tables)) for tables in (texts, heldout_texts))
            yardsticks = report.ngram_yardsticks(settings.evaluation.ngrams, trained, held, data.tokenizer)
        for name, nats in yardsticks.items():
            bits = report.bits_per_byte(nats, heldout.get("text") or heldout[""])
            say(f"yardstick: {name} model, {bits:.3f} held-out bits per byte")

    with contextlib.ExitStack() as stack:
        stack.callback(stream.close)
        if jax.process_index() == 0:
            stack.enter_context(only_run(folder))
        stack.enter_context(sharding.use(mesh, settings.rules))
        stack.enter_context(use_kernel(compute.attention))
        stack.enter_context(use_grouped(compute.experts))

        # --- Model and optimizer, as shapes so far --------------------------------------------------------------
        model = tune.abstract_model(settings)
        graphdef, params = parameters.split(model)
        trainable = parameters.trained(model, params)
        say(report.sharding_text(parameters.placements(model, mesh, settings.rules), mesh, trainable))
        if len(trainable) < len(params):
            say(report.trained_text(model))
        sharding.activation_spec((data.rows, data.length), "batch", "length")  # refuses here, not at the first step
        check_units(data, sharding.split_count("length"))
        data_parts = sharding.split_count("batch", data.rows)
        optimizer = make_optimizer(settings.optimizer, run.steps, trainable, tune.rates(model, settings.tune))
        shardings = state_shardings(model, optimizer, mesh, settings.rules)
        peak = flops.peak_flops(jax.devices()[0].device_kind, run.peak_tflops)
        has_experts = any("experts" in each.axes for each in parameters.describe(model).values())
        say(report.compute_text(compute, chosen_kernel(), peak, experts=chosen_grouped() if has_experts else None))
        if warning := report.warm_up_text(settings.optimizer, run.steps):
            say(warning)

        # --- State: of the newest checkpoint, or the first ------------------------------------------------------
        manager = checkpoint.open_checkpoints(folder / "checkpoints", keep=settings.checkpoint.keep)
        stack.callback(checkpoint.close, manager)
        done = checkpoint.latest_step(manager) or 0
        if done and not run.resume:
            raise UserError(f"{folder} holds a run, at step {done}; choose another Run.dir, or set Run.resume=True")
        if done:
            state, data_state = checkpoint.restore(manager, done, abstract_state(model, optimizer), shardings)
            stream.restore(data_state)
            say(f"resumed at step {done}{changed_settings(checkpoint.saved_config(manager), text)}")
        else:
            state = init_state(first_model(settings, mesh), optimizer, mesh, settings.rules)
        if done >= run.steps:
            say(f"nothing to train: step {done} is done and Run.steps = {run.steps}; raise it, or choose a new Run.dir")
        else:
            say(f"\n{text}")  # not sooner: a mistake found above stands next to the command that made it
            if jax.process_index() == 0:
                (folder / "config.gin").write_text(text)

        # --- Steps ----------------------------------------------------------------------------------------------
        dtype = jnp.dtype(compute.dtype)
        step: Any = train_step(
            model, optimizer, mesh, settings.rules, accumulation=compute.accumulation, dtype=dtype, seed=run.seed
        )
        evaluate = evaluation_step(model, dtype=dtype)
        log = StepLog(
            folder,
            done=done,
            last=run.steps,
            learning_rate=learning_rate(settings.optimizer, run.steps),
            cost=flops.forward_cost(model, settings.model.attention_costs()),
            peak=peak,
            sources=source_names(data.source),
        )
        stack.callback(log.close)
        answers = list[Answer]()
        programs = 1  # compiled, once the first step is done
        begin, end = run.profile or (1, 0)
        traced = range(max(begin, done + 1), min(end, run.steps) + 1)
        if run.profile and not traced:
            say(f"no trace: Run.profile = {run.profile} names no step that is left")
        number = done
        for number, (rows, last) in zip(range(done + 1, run.steps + 1), with_last(stream), strict=False):
            last = last or number == run.steps
            if traced and number == traced[0]:
                log.flush()
                jax.profiler.start_trace(str(folder / "profile"))
            with sharding.record() as activations:  # of the first step, which is traced, and of one compiled anew
                state, results = step(state, put_batch(rows.arrays, mesh, settings.rules))
            for line in report.alternatives((label(each.names, each.shape), each) for each in activations):
                log.say(line)
            log.record(number, rows, results | rows.metrics | imbalance(rows.arrays, data_parts))
            if step._cache_size() > programs:
                log.say(f"warning: step {number} was compiled anew; every batch should have one shape and one sharding")
                programs = step._cache_size()
            if number in traced and (last or number == traced[-1]):
                log.flush()
                jax.profiler.stop_trace()
            if heldout and (last or number % settings.evaluation.every == 0):
                values = heldout_metrics(evaluate, state.params, heldout, mesh, settings.rules)
                if last and settings.evaluation.answers:
                    answers = heldout_answers(model, state.params, settings, heldout, mesh)
                    values["heldout/answers_right"] = sum(each.right for each in answers) / max(len(answers), 1)
                log.flush(values)
                log.say(f"step {number}: " + ", ".join(f"{name} {value:.4f}" for name, value in values.items()))
                log.pause()
            if last or (settings.checkpoint.every and number % settings.checkpoint.every == 0):
                log.flush()  # a state that came of a loss that is not finite is never saved
                checkpoint.save(manager, state, rows.state, text)
                log.pause()
            checkpoint.check(manager)  # a save that failed in the background stops the run now, not at the next save
        if number < run.steps:
            log.say(f"the data ended at step {number}, before Run.steps = {run.steps}")
        checkpoint.close(manager)
        log.close()

        # --- The end --------------------------------------------------------------------------------------------
        if jax.process_index() == 0:
            say(f"picture of the loss: {metrics.plot_loss(folder, yardsticks)}")
            if log.expert_load is not None:
                say(f"picture of the experts' load: {metrics.plot_expert_load(folder, log.expert_load)}")
            if answers and (picture := plot_answers(folder, make_items(data, heldout_texts), answers)):
                say(f"picture of answers: {picture}")
        if settings.sample.prompt:
            say(f"sample: {continuation(parameters.merge(graphdef, state.params), settings)!r}")
    python, quoted, prompt = commands.python(), shlex.quote(str(folder)), settings.sample.prompt or "your prompt"
    say(f"to go on:   {python} -m omnijax.train {quoted}/config.gin Run.steps={2 * max(done, run.steps)}")
    say(f"to sample:  {python} -m omnijax.generate {quoted} {shlex.quote(prompt)}")
    return log.last


def run_folder(path: str) -> Path:
    """The run folder, made if missing; `UserError` where it cannot be written, before anything is computed."""
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"Run.dir = {path!r} cannot be made ({error.strerror}); choose another folder") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"Run.dir = {path!r} cannot be written to; choose another folder")
    return folder


def use_compile_cache(folder: str) -> str:
    """Keep compiled programs in `folder`, or where JAX_COMPILATION_CACHE_DIR says; returns the place."""
    place = os.environ.get("JAX_COMPILATION_CACHE_DIR") or (str(Path(folder).expanduser()) if folder else "")
    if place:
        jax.config.update("jax_compilation_cache_dir", place)
    return place or "off"


def heldout_metrics(
    evaluate, params: parameters.Parameters, heldout: Mapping[str, Evaluation], mesh: Mesh, rules: Rules
) -> dict[str, float]:
    """Means over all held-out tokens, each counted once on any mesh and for any batch, and bits per byte of text."""
    totals: dict[str, np.ndarray] = {}
    for name, evaluation in heldout.items():
        totals[name] = np.zeros(2)
        for rows in evaluation.steps:
            means = evaluate(params, put_batch(rows.arrays, mesh, rules))
            totals[name] += np.asarray(jax.device_get(means["cross_entropy"]), np.float64)
    loss, weight = np.sum(list(totals.values()), axis=0)
    found = {"heldout/loss": loss / weight}
    for name, (loss, weight) in totals.items():
        if len(heldout) > 1:
            found[f"heldout/{name}_loss"] = loss / weight
        if heldout[name].bytes:
            found["heldout/bits_per_byte"] = report.bits_per_byte(loss / weight, heldout[name])
    return found


def heldout_answers(
    model, params: parameters.Parameters, settings: config.Train, heldout: Mapping[str, Evaluation], mesh: Mesh
) -> list[Answer]:
    """What the model answers to `Evaluation.answers` of the held-out chats, or to all that there are."""
    follow = answering(model, mesh, dtype=jnp.dtype(settings.compute.dtype))
    steps, count = [], 0
    for rows in heldout["chats" if "chats" in heldout else ""].steps:
        if count < settings.evaluation.answers:
            steps.append(rows)
            count += sum(len(row_ids) for row_ids in rows.row_ids)
    return answer(follow, params, steps, settings.data.tokenizer, mesh, settings.rules)


def changed_settings(before: str, after: str) -> str:
    """The lines in which a resumed run's settings differ from those its checkpoint was made with."""
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    changed = [line for line in lines if line[:1] in "+-" and line[2:].strip()]
    return "".join(f"\n  setting {line}" for line in changed)


def continuation(model, settings: config.Train) -> str:
    """The sample a run ends with."""
    tokenizer = settings.data.tokenizer
    ids = sample(
        model,
        tokenizer.encode(settings.sample.prompt),
        tokens=settings.sample.tokens,
        context=settings.data.length,
        temperature=settings.sample.temperature,
        seed=settings.run.seed,
    )
    return settings.sample.prompt + tokenizer.decode(ids)


if __name__ == "__main__":
    commands.run(main)
