"""`python -m cli` is `meshctl`."""

from cli.main import main

main()
