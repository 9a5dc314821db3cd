"""The command ``fairseq-sharing``: one file for each subcommand, each with HELP, add_arguments and run."""
