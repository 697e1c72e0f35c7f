"""The entry point of `snakemake` in this folder. The pipeline is in workflow/Snakefile, where catalogues expect it."""


include: "workflow/Snakefile"


# An included file cannot set the default target. A workflow that uses this one as a module keeps its own.
if not IS_MODULE:
    workflow.default_target = "all"
