"""``python -m speechtrain`` is the program ``speechtrain``."""

from speechtrain.commands.main import main

if __name__ == "__main__":
    main()
