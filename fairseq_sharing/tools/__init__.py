"""The command ``fairseq-sharing``: one file for each subcommand, each with HELP, add_arguments and run.

What several of them need is beside them: `files`, `progress` and `picture` for reading and writing, `model` and `cost`
for looking at a model, `convert` for making another out of it, `logs` for training's.
"""
