"""Messages whose advice no test of this folder follows, by module, with the reason. The lists only shrink."""

from __future__ import annotations

#: Texts that look like advice and are none: titles, notes below tables, statements, code.
NOT_ADVICE: dict[str, tuple[str, ...]] = {
    "audit/code.py": ("no job recorded its code: it was untracked, or run by an earlier version",),
    "audit/replay.py": ("train.json: {} is not that of the checkpoint at step {}",),
    "cli/clean.py": ("Remove all of this?",),
    "cli/data.py": ("{}: written; commit it with the configuration",),
    "cli/provenance.py": ("  code      Spider {}, commit {}{}",),
    "cli/train.py": ("%s: set in the environment and ignored, %s",),
    "compress/code.py": ("loaded = {name: getattr(m, ",),
    "evaluation/baselines.py": ("Compressors coded the same bytes",),
    "evaluation/candidates.py": ("Point at a byte for its candidates and its cost.",),
    "evaluation/harness.py": ("Run on {} by lm-evaluation-harness {}",),
    "evaluation/records.py": ("Bits per byte: nats of the predicted bytes",),
    "report/formatting.py": ("{} of decoded text: the tokenizer does not keep newlines",),
    "report/terminal.py": (
        "Each document alone: nothing of other held-out documents is read",
        "make ui{}",
        "make report{}",
        "Look at every run in MLflow",
        ": bits per byte, lower is better",
    ),
    "sources/pydocs.py": ("edistribution and use",),
    "tracking/registry.py": ("its registered model was deleted in MLflow and stays deleted", "name = '{}'"),
    "tracking/runs.py": ("run %s: stage %s is trained again, in a new tracked run", "train {}"),
    "tracking/store.py": ("UPDATE {} SET {} = :new",),
    "tracking/sync.py": ("run {}: {}",),
    "tracking/versions.py": ("as decoded by its tokenizer: compare only scores", "Run **{}**{}"),
    "training/loop.py": ("step %d: the loss or its gradient is not finite, update skipped",),
}

#: Advice that needs what this machine lacks, or that the tests named here follow on real systems.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    # A driver, a GPU and several processes on GPUs.
    "processes/device.py": (
        "install a build of torch for its CUDA",
        "update the driver, or {}",
        "start on a machine with a GPU and its driver",
        "start where there is one (nvidia-smi, CUDA_VISIBLE_DEVICES)",
    ),
    "processes/world.py": ("start at most one process for each GPU (--nproc-per-node)",),
    # GPU memory: tests/unit/processes/test_device.py.
    "training/memory.py": (
        "(nvidia-smi says which; end it)",
        "no change that keeps the model would fit: take a smaller model, or a larger GPU",
        " or set model.{}: {}",
        # tests/unit/cli/test_train.py::test_the_remedy_for_running_out_of_memory_continues_the_stage
        "set micro_batch: {} and grad_accum: {}. The stage then goes on from its last checkpoint",
    ),
    # A diverged training with a checkpoint:
    # tests/unit/cli/test_train.py::test_the_remedies_of_a_diverged_training_can_be_followed
    "training/loop.py": ("move {} away and ",),
    # Tokenizers that change the text, and of bytes: tests/unit/evaluation/test_foreign.py
    # test_a_tokenizer_that_changes_the_text_is_refused_unless_that_is_allowed.
    "evaluation/foreign.py": ("or score the changed text with --allow-lossy",),
    # A cluster: tests/workflow/test_slurm.py and tests/unit/test_cluster.py.
    "cluster.py": (
        "this cluster has no partition {name}",
        "Slurm refuses this account on this partition",
        "the partition lacks these GPUs",
        "the time limit of the partition is lower",
        "every node of the partition is smaller",
        "Slurm's commands are not on this machine",
        "Slurm does not answer",
        "move the project, or set XDG_CACHE_HOME to a folder without a space",
        "name another folder in XDG_CACHE_HOME, or move the project",
    ),
    # Small and read-only disks, which are mounted: tests/workflow/test_hostile.py. Root may write everywhere.
    "cli/__init__.py": (
        "no space left on the disk; free some and run the same command again",
        "disk quota exceeded; free some space and run the same command again",
        "the file system is read-only; name a writable folder under `results:`",
        "permission denied; name a folder you may write under `results:`",
        "interrupted; run the same command again to continue",
    ),
    "data/encode.py": ("make the folder writable",),
    "doctor.py": (
        "cannot be written; make it writable, or name",
        "look whether network, disk or driver hang",
    ),
    "sources/local.py": ("cannot be read or written; check its permissions",),
    # A step that never ends: tests/unit/processes/test_watchdog.py.
    "processes/shutdown.py": ("run again to go on from the last checkpoint",),
    # Disks without locks, and killed workflows: tests/unit/test_unlock.py, tests/workflow/test_kill.py.
    "unlock.py": (
        "this disk has no file locks (%s); after a workflow was killed, run snakemake --unlock",
        "wait for that process or stop it, and do not use --unlock",
    ),
    # Servers and databases of MLflow: tests/unit/tracking.
    "tracking/pyfunc.py": ("Name the present path of the checkpoint",),
    "tracking/registry.py": (
        "rename one of them",
        "To reset it, delete that alias and tracking/sent.json, and sync",
    ),
    "tracking/store.py": ("make a copy of it and run `mlflow db upgrade {}`", "install the same here"),
    "tracking/target.py": (
        "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
        "this user may not write there (403)",
        "the database refuses this user or password; set PGPASSWORD",
        "send to the server's address instead of its database",
    ),
    # An environment without transformers: tests/unit/test_install.py.
    "hf/remote.py": ("this model needs Spider with its extra `hf`",),
    # Snakemake modules: tests/workflow/test_module.py.
    "rules/common.smk": ("a module's `prefix:` cannot move it; name a relative folder",),
}

#: Advice that no test follows yet.
NOT_YET: dict[str, tuple[str, ...]] = {
    "data/hub.py": (
        "{}: is a folder; name the files in it",
        "the hub rejects the token (401); check HF_TOKEN",
    ),
    "data/remote.py": (
        "the file is damaged or not a parquet file: leave it out",
        "{}, twice; run again, and {}",
    ),
    "data/store.py": ("delete its folder",),
    "data/stream.py": (
        "no document to train on; check its text column",
        "a stream needs the hub; unset HF_HUB_OFFLINE",
        "leave it out, or name another revision",
    ),
    "ngram/candidates.py": ("and this machine has {} GB; lower it",),
    "publish/push.py": (
        "no such branch; leave --revision out",
        "no such repository, or your token may not read it",
        "set HF_HUB_DISABLE_XET=1 and push again",
    ),
    "sources/pydocs.py": ("cannot read {}: {}; reinstall {}",),
    "sources/tokens.py": ("export the text with a model that has byte pieces (byte_fallback=True)",),
    "tokens/sentencepiece.py": ("leave it out of the text",),
}
