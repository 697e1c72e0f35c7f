"""Names for parts of the whole: `snakemake runs/NAME` for a run or a sweep of runs, `datasets/NAME`."""

parts = {f"datasets/{name}": metadata(name) for name in CONFIG.datasets}
parts |= {f"runs/{name}": evaluations([name]) for name in CONFIG.runs}
parts |= {f"runs/{name}": evaluations(runs) for name, runs in CONFIG.sweeps.items()}

for part, files in parts.items():

    rule:
        name:
            part
        input:
            files,
