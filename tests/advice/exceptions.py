"""Messages whose advice no test of this folder follows, by module, with the reason. The lists only shrink."""

from __future__ import annotations

#: Texts that look like advice and are none: titles, notes below tables, statements, code.
NOT_ADVICE: dict[str, tuple[str, ...]] = {
    "trust/code.py": ("no job recorded its code: it was untracked, or run by an earlier version",),
    "cli/inspect.py": ("Remove all of this?", "  code      Spider {}, commit {}{}"),
    "cli/train.py": ("%s: set in the environment and ignored, %s",),
    "checkpoints/compress/pipeline.py": ("loaded = {name: getattr(m, ",),
    "evaluation/baselines.py": ("Compressors coded the same bytes",),
    "evaluation/records.py": (
        "Bits per byte: nats of the predicted bytes",
        "{} of decoded text: the tokenizer does not keep newlines",
    ),
    "report/tables.py": (
        "make ui{}",
        "Compare in MLflow",
        "held-out bytes of {}, lower is better",
    ),
    "data/sources/pydocs.py": ("edistribution and use",),
    "tracking/registry.py": ("its registered model was deleted in MLflow and stays deleted", "name = '{}'"),
    "tracking/target.py": ("UPDATE {} SET {} = :new",),
    "tracking/trainings.py": ("train {}/{}", "evaluate --model {}"),
    "training/loop.py": ("step %d: the loss or its gradient is not finite, update skipped",),
}

#: Advice that needs what this machine lacks, or that the tests named here follow on real systems.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    # tests/workflow/test_extras.py, where it is followed backwards.
    "common/extras.py": ("run `pip install ./extras/{}` in Spider's folder",),
    # A driver and a GPU.
    "processes/device.py": (
        "install a build of torch for its CUDA",
        "update the driver, or {}",
        "start on a machine with a GPU and its driver",
        "start where there is one (nvidia-smi, CUDA_VISIBLE_DEVICES)",
    ),
    # GPU memory: tests/unit/cli/test_train.py
    # test_the_remedy_for_running_out_of_memory_continues_the_stage.
    "training/memory.py": ("set {}. The stage then goes on from its last checkpoint",),
    # A compiler that fails: tests/unit/training/test_passes.py.
    "training/compilation.py": ("cannot compile this model here ({}); set compile: false",),
    # A GPU: tests/unit/training/test_passes.py::test_passes_that_cannot_be_captured_name_the_switch.
    "training/passes.py": ("cannot be captured here ({}); set graphs: off",),
    # Tokenizers that change the text, and of bytes: tests/unit/evaluation/test_foreign.py
    # test_a_tokenizer_that_changes_the_text_is_refused.
    # The same file, test_a_text_that_ends_inside_of_a_character_is_scored_up_to_there.
    "evaluation/foreign.py": (
        "Choose a model with a tokenizer of bytes",
        "{}; set evaluation.max_bytes to {}",
    ),
    # A cluster: tests/workflow/test_slurm.py and tests/unit/test_start.py. A disk without locks: there too.
    "workflow/start.py": (
        "this disk has no file locks (%s); after a workflow was killed, run snakemake --unlock",
        "this cluster has no partition {name}",
        "Slurm refuses this account on this partition",
        "the partition lacks these GPUs",
        "the time limit of the partition is lower",
        "every node of the partition is smaller",
        "Slurm's commands are not on this machine",
        "Slurm does not answer",
    ),
    # A disk with quotas.
    "cli/__init__.py": ("disk quota exceeded; free some space and run the same command again",),
    # A step that never ends: tests/unit/processes/test_watchdog.py.
    "processes/shutdown.py": ("run again to go on from the last checkpoint",),
    # Servers and databases of MLflow: tests/unit/tracking, tests/browser/test_tracking.py.
    "tracking/pyfunc.py": ("Name the present path of the checkpoint",),
    # tests/unit/tracking/test_sync.py::test_a_damaged_record_is_named_and_the_rest_is_sent
    "provenance/made.py": ("delete this record",),
    # A worktree of an older commit: docs/trust.md.
    "trust/replay.py": ("run the audit with PYTHONPATH set to a worktree of the commit",),
    "tracking/registry.py": ("To reset it, delete that alias",),
    "tracking/target.py": (
        "make a copy of it and run `mlflow db upgrade {}`",
        "install the same here",
        "this user may not write there (403)",
        "send to the server's address instead of its database",
    ),
    # An environment without Spider: tests/unit/hf/test_hf_registered.py, tests/unit/test_install.py.
    "hf/remote.py": ("this model needs Spider with its extra `hf`",),
    # Snakemake modules, and an image: tests/workflow/test_module.py, test_container.py.
    "rules/common.smk": (
        "a module's `prefix:` cannot move it; name a relative folder",
        "set `container: spider.sif` in the configuration",
    ),
}
