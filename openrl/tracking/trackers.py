"""The trackers that ``--track_with`` names. Each library is imported when its tracker starts.

A tracker is registered as a function from a ``TrackedRun`` to a ``Tracker``, with the packages it
imports as ``needs``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from openrl.config.groups.logging import LoggingFlags
from openrl.extension_points import trackers
from openrl.tracking.tables import COLUMNS, AnswerTable


class Tracker(Protocol):
    """May also have ``alert(step, title, text)``, which shows a warning about the run,
    ``log_table(step, table)``, which shows answers, and ``log_report(path)``, which keeps the HTML
    page on the run that has ended."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of one step; steps only rise."""

    def close(self) -> None:
        """Send what is pending."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker learns about a run when it starts."""

    name: str
    directory: Path  # of the run
    config: Mapping[str, Any]  # the effective flags
    keep_until: int  # the step that a resumed run continues from, -1 for a fresh one
    flags: LoggingFlags
    arguments: Mapping[str, Any]  # from --tracker_kwargs, for this tracker

    @property
    def project(self) -> str:
        return self.flags.wandb_project or "openrl"

    @property
    def common_arguments(self) -> dict[str, Any]:
        return {"project": self.project, "name": self.name, "config": dict(self.config)}


@trackers.register("tensorboard", needs=("tensorboard",))
class TensorBoardTracker:
    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        parent = run.flags.use_tensorboard or run.directory / "tensorboard"
        # purge_step hides what an interrupted run wrote after the step to resume from
        purge_step = run.keep_until + 1 if run.keep_until >= 0 else None
        defaults = {"log_dir": str(Path(parent) / run.name), "purge_step": purge_step}
        self._writer = SummaryWriter(**{**defaults, **run.arguments})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def alert(self, step: int, title: str, text: str) -> None:
        self._writer.add_text(f"alarms/{title}", text, step)

    def log_table(self, step: int, table: AnswerTable) -> None:
        import numpy as np

        self._writer.add_text(table.name, table.markdown(), step)
        for n, picture in enumerate(table.opened()):
            name = f"{table.name}/images/{n}"
            self._writer.add_image(name, np.asarray(picture), step, dataformats="HWC")

    def log_report(self, path: Path) -> None:
        self._writer.add_text("report", f"    {path.absolute()}")  # it holds no files

    def close(self) -> None:
        self._writer.close()


class RunTracker:
    """A tracker whose library hands out an object for the run."""

    _run: Any

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


@trackers.register("wandb", needs=("wandb",))
class WandbTracker(RunTracker):
    """Logs to Weights & Biases. Whatever the flags leave open ($WANDB_API_KEY, $WANDB_RUN_ID, ...)
    comes from the environment."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        flags = run.flags
        defaults = run.common_arguments | {
            "entity": flags.wandb_org,
            "group": flags.wandb_group,
            "name": flags.wandb_run_name or run.name,
            "dir": flags.wandb_dir or run.directory,
            "mode": flags.wandb_mode,
            "settings": wandb.Settings(silent=True, console="off"),
        }
        self._run = wandb.init(**{**defaults, **run.arguments})
        self._run.define_metric("*", step_metric="step")  # our steps, not wandb's count of calls

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def alert(self, step: int, title: str, text: str) -> None:
        self._run.alert(title, text)

    def log_table(self, step: int, table: AnswerTable) -> None:
        import wandb

        shown: dict[str, Any] = {table.name: wandb.Table(columns=[*COLUMNS], data=table.rows)}
        if table.pictures:
            shown[f"{table.name}/images"] = [wandb.Image(picture) for picture in table.opened()]
        self._run.log({"step": step, **shown})

    def log_report(self, path: Path) -> None:
        import wandb

        artifact = wandb.Artifact(f"report-{self._run.id}", type="report")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)


@trackers.register("swanlab", needs=("swanlab",))
class SwanLabTracker(RunTracker):
    """Logs to SwanLab. The key is $SWANLAB_API_KEY; {"mode": "offline"} keeps everything on this
    machine."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        directory = {"log_dir": str(run.directory / "swanlab")}
        self._run = swanlab.init(**{**run.common_arguments, **directory, **run.arguments})

    def log_table(self, step: int, table: AnswerTable) -> None:
        import swanlab

        shown = {table.name: [swanlab.Text(table.markdown())]}
        if table.pictures:
            shown[f"{table.name}/images"] = [swanlab.Image(picture) for picture in table.opened()]
        self._run.log(shown, step=step)

    def log_report(self, path: Path) -> None:
        self._run.save(path, base_path=path.parent, policy="now")


@trackers.register("mlflow", needs=("mlflow",))
class MLflowTracker:
    """Logs to the server at $MLFLOW_TRACKING_URI or, without one, to a database in the run's
    directory."""

    LONGEST_PARAM = 6000  # characters

    def __init__(self, run: TrackedRun) -> None:
        import mlflow
        from mlflow.entities import Param

        files = None  # where the server keeps them
        if not mlflow.environment_variables.MLFLOW_TRACKING_URI.is_set():
            here = run.directory.absolute()
            self._client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{here / 'mlflow.db'}")
            files = (here / "mlflow").as_uri()
        else:
            self._client = mlflow.MlflowClient()
        arguments = dict(run.arguments)
        project = arguments.pop("experiment_name", run.project)
        found = self._client.get_experiment_by_name(project)
        experiment = (
            found.experiment_id
            if found
            else self._client.create_experiment(project, artifact_location=files)
        )
        self._run_id = self._client.create_run(
            experiment, **{"run_name": run.name, **arguments}
        ).info.run_id
        params = [Param(name, str(v)[: self.LONGEST_PARAM]) for name, v in run.config.items()]
        for first in range(0, len(params), 100):  # one call takes at most 100
            self._client.log_batch(self._run_id, params=params[first : first + 100])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        import time

        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # mlflow does not allow @ in names
        metrics = [Metric(n.replace("@", "_at_"), v, now, step) for n, v in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def alert(self, step: int, title: str, text: str) -> None:
        self._client.set_tag(self._run_id, f"alarms.{title}", text)

    def log_table(self, step: int, table: AnswerTable) -> None:
        import numpy as np

        columns = dict(zip(COLUMNS, map(list, zip(*table.rows, strict=True)), strict=True))
        folder = f"{table.name}/step_{step}"
        self._client.log_table(self._run_id, columns, f"{folder}.json")
        for n, picture in enumerate(table.opened()):
            self._client.log_image(self._run_id, np.asarray(picture), f"{folder}/{n}.png")

    def log_report(self, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path))

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


@trackers.register("trackio", needs=("trackio",))
class TrackioTracker(RunTracker):
    """Writes to $TRACKIO_DIR or, with {"space_id": NAME}, to a Hugging Face Space."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._run = trackio.init(**{**run.common_arguments, **run.arguments})

    def alert(self, step: int, title: str, text: str) -> None:
        import trackio

        if hasattr(trackio, "alert"):  # since 0.15
            trackio.alert(title=title, text=text)

    def log_table(self, step: int, table: AnswerTable) -> None:
        import pandas
        import trackio

        frame = pandas.DataFrame(table.rows, columns=[*COLUMNS])
        self._run.log({table.name: trackio.Table(dataframe=frame)}, step=step)

    def log_report(self, path: Path) -> None:
        self._run.log_artifact(path, type="report")


@trackers.register("prometheus", needs=("prometheus_client",))
class PrometheusTracker:
    """Serves the newest values at http://127.0.0.1:9400/metrics, or at another {"port": N}: each
    metric as openrl_metric with its name as a label."""

    PORT = 9400

    def __init__(self, run: TrackedRun) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._run, self._values = run.name, dict[str, float]()
        registry = CollectorRegistry()
        registry.register(self)
        port = int(run.arguments.get("port", self.PORT))
        self._server, _ = start_http_server(port, "127.0.0.1", registry)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._values = {**values, "step": float(step)}  # a request meanwhile gets the old ones

    def collect(self) -> Iterator[Any]:
        """Yield what a request gets."""
        from prometheus_client.metrics_core import GaugeMetricFamily

        text = "The newest value of a metric of the run."
        family = GaugeMetricFamily("openrl_metric", text, labels=("run", "name"))
        for name, value in self._values.items():
            family.add_metric((self._run, name), value)
        yield family

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
