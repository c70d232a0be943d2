"""Everything a run leaves behind as it goes: metrics, events, adapters, results."""

import time

from tlora.core.errors import TloraError
from tlora.core.job import BaseSpec
from tlora.model.adapters import AdapterWeights
from tlora.model.peft_format import serving_commands
from tlora.runtime.directory import JobResult, RunDirectory
from tlora.runtime.exporting import export
from tlora.runtime.progress import Progress
from tlora.training.driver import JobDriver, Status
from tlora.training.engine import Engine
from tlora.training.outcome import EvaluationDone, Outcome, StepDone


class Recorder:
    """The training loop's observer."""

    def __init__(
        self, directory: RunDirectory, base: BaseSpec, engine: Engine, progress: Progress
    ) -> None:
        self.directory = directory
        self.base = base
        self.engine = engine
        self.progress = progress
        self.results: list[JobResult] = []
        self._started = time.perf_counter()
        self._last_step: dict[str, float] = {}

    def start(self, drivers: list[JobDriver], budget_tokens: int) -> None:
        self._started = time.perf_counter()
        for driver in drivers:
            self._last_step[driver.name] = self._started
            self.directory.event("attached", job=driver.name, total_steps=driver.total_steps)
        self.progress.start(drivers, budget_tokens)

    def on_nano_batch(self, outcome: Outcome) -> None:
        self.directory.event(
            "nano_batch",
            purpose=outcome.kind.value if outcome.kind else None,
            rows=outcome.rows,
            tokens=outcome.tokens,
            seconds=round(outcome.seconds, 6),
            error=outcome.error,
        )
        self.progress.on_nano_batch(outcome)

    def on_step(self, driver: JobDriver, done: StepDone) -> None:
        now = time.perf_counter()
        seconds = now - self._last_step[driver.name]
        self._last_step[driver.name] = now
        if done.step % driver.spec.train.logging_steps == 0 or done.step == driver.total_steps:
            self._metrics(
                driver,
                "train",
                loss=done.loss,
                lr=done.learning_rate,
                grad_norm=done.grad_norm,
                target_tokens=done.target_tokens,
                nano_batches=done.nano_batches,
                tokens_per_s=round(done.tokens / max(seconds, 1e-9), 1),
            )
        self.progress.on_step(driver, done)

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
        self._last_step[driver.name] = time.perf_counter()
        self._metrics(driver, "eval", loss=done.loss, target_tokens=done.target_tokens)
        if driver.best is not None and driver.best.step == done.step:
            self._export(driver, driver.best.weights, "best")
        self.progress.on_evaluation(driver, done)

    def on_end(self, driver: JobDriver) -> None:
        adapter = None
        if driver.status is not Status.FAILED:
            weights = self.engine.super_model.weights(driver.name)
            adapter = self._export(driver, weights, "adapter")
        best = driver.best
        result = JobResult(
            job=driver.name,
            status=driver.status.value,
            reason=driver.reason,
            steps=driver.step,
            total_steps=driver.total_steps,
            loss=driver.loss,
            first_eval_loss=driver.first_eval_loss,
            eval_loss=driver.eval_loss,
            best_eval_loss=best.loss if best else None,
            best_step=best.step if best else None,
            tokens_seen=driver.tokens_seen,
            sequences_seen=driver.sequences_seen,
            seconds=round(time.perf_counter() - self._started, 3),
            adapter=adapter,
            best_adapter=f"{driver.name}/best" if best else None,
        )
        self.results.append(result)
        self.directory.write_result(result)
        self.directory.event("ended", job=driver.name, status=result.status, reason=result.reason)
        serving = []
        if adapter is not None:
            path = (self.directory.root / adapter).resolve()
            serving = serving_commands(
                path, driver.name, base_model=self.base.model, rank=driver.spec.lora.r
            )
        self.progress.on_end(result, serving)

    def _export(self, driver: JobDriver, weights: AdapterWeights, name: str) -> str | None:
        """A full disk or a wrong file is this job's failure, not its neighbours'."""
        path = self.directory.job(driver.name) / name
        try:
            export(path, weights, driver.spec, self.base, self.engine.super_model, driver.train[0])
        except (OSError, TloraError) as error:
            driver.status = Status.FAILED
            driver.reason = f"the adapter could not be written to {path}: {error}"
            return None
        return f"{driver.name}/{name}"

    def _metrics(self, driver: JobDriver, kind: str, **values: object) -> None:
        fields = ("loss", "lr", "grad_norm", "target_tokens")
        record: dict[str, object] = {
            "v": 1,
            "kind": kind,
            "job": driver.name,
            "step": driver.step,
            "total_steps": driver.total_steps,
            "epoch": round(driver.epoch, 4),
            **{name: values.get(name) for name in fields},
            "tokens_seen": driver.tokens_seen,
            "sequences_seen": driver.sequences_seen,
            "nano_batches": values.get("nano_batches"),
            "tokens_per_s": values.get("tokens_per_s"),
            "time": time.time(),
        }
        self.directory.append(self.directory.job(driver.name) / "metrics.jsonl", record)
