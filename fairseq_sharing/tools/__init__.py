"""The command ``fairseq-sharing``: one file for each subcommand, each with HELP, add_arguments and run.

`export` and `import_` have a file for each format: ``export_<format>`` and ``import_<format>``, or both in one. What
several subcommands need is beside them: `files`, `progress` and `picture` for reading and writing, `model` and `cost`
for looking at a model, `trained` for a model with its weights, `convert` for making another out of it, `logs` for
training's. `cost` takes its figures from `sizes`, `flops` and `activations`, the last two from `fake_training`;
`compare` has `configurations` for what it reads, `equal_sizes` for what it changes, and `cost_picture`.
"""
