"""What ``python -m millpond.testing.transcripts FILE…`` runs."""

from millpond.testing.transcripts.command import main

if __name__ == "__main__":
    main()
