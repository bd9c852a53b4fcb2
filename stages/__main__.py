"""`python -m loram_stages`: the same as the `loram` command."""

from .cli import main

main()
