"""``python -m fusednorm``."""

from fusednorm.cli import main

if __name__ == "__main__":
    main()
