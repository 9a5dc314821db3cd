"""The command ``fairseq-sharing``.

One file for each subcommand, each with HELP, add_arguments and run. `export` and `import_` have a file for each format:
``export_<format>`` and ``import_<format>``, or both in one.
"""
