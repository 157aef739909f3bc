"""Show where every array of a model lives: `python -m omnijax.inspect CONFIG.gin [Name.field=value ...]`.

With `--data` before the config, show what it trains on instead: `omnijax.inspect_data`.

Takes no device memory, and needs no devices: a mesh of any size can be looked at from a laptop.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from omnijax import commands, config, inspect_data, parameters, report, sharding, tune
from omnijax.batch import Batch
from omnijax.mesh import mesh_shape
from omnijax.sharding import MESH_AXES, Placement


def main() -> None:
    if "--data" in sys.argv:
        sys.argv.remove("--data")
        for line in inspect_data.show(commands.settings_from_command_line("inspect --data").value):
            print(line)
    else:
        print(inspect(commands.settings_from_command_line("inspect").value))


def inspect(settings: config.Train) -> str:
    """A table of every parameter (axes, shape, spec, bytes per device) and of every activation that is laid out."""
    mesh = abstract_mesh(settings.mesh)
    model = tune.abstract_model(settings)
    placed = parameters.placements(model, mesh, settings.rules)
    trained = parameters.trained(model, placed)
    rows: list[tuple[str, ...]] = [
        (
            path,
            sharding.label(each.names, each.shape),
            str(each.spec),
            f"{report.bytes_per_device(each, mesh):,}",
            "; ".join(each.fallbacks),
        )
        for path, each in placed.items()
    ]
    lines = [f"mesh: {mesh.size} devices, {report.axes_text(mesh)}", report.sharding_text(placed, mesh, trained)]
    lines += [*(report.trained_text(model).splitlines() if len(trained) < len(placed) else ()), ""]
    lines += _table(("parameter", "axes", "spec", "bytes a device", "alternative taken"), rows)
    seen = {(each.names, each.shape): each for each in activations(settings, model, mesh)}
    rows = [
        (sharding.label(each.names, each.shape), str(each.spec), "; ".join(each.fallbacks)) for each in seen.values()
    ]
    lines += ["", *_table(("activation", "spec", "alternative taken"), rows)]
    return "\n".join(lines)


def abstract_mesh(sizes: config.Mesh) -> AbstractMesh:
    """The mesh of a config without its devices. A size of -1 counts the devices of this machine."""
    shape = mesh_shape(vars(sizes), jax.device_count())
    return AbstractMesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def activations(settings: config.Train, model, mesh: AbstractMesh) -> list[Placement]:
    """Placements of the activations of one micro-batch's forward pass, in the order they are met."""
    shape = (settings.data.rows // settings.compute.accumulation, settings.data.length)
    integers: Any = jax.ShapeDtypeStruct(shape, jnp.int32)
    weights: Any = jax.ShapeDtypeStruct(shape, jnp.float32)
    batch = Batch(integers, integers, integers, integers, weights, integers)
    graphdef, params = parameters.split(model)
    with sharding.use(mesh, settings.rules), sharding.record() as placements:
        jax.eval_shape(lambda params, batch: parameters.merge(graphdef, params)(batch).hidden, params, batch)
    return placements


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]


if __name__ == "__main__":
    commands.run(main)
