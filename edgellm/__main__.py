"""`python -m edgellm`: the same as the command `edgellm`."""

from edgellm.cli.main import main

if __name__ == "__main__":
    main()
