"""`python -m jaxsub`: the command line."""

from jaxsub.cli import main

if __name__ == "__main__":
    main()
