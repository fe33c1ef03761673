"""``python -m cwtrain_emulator serve``."""

from cwtrain_emulator._group import emulator_group

if __name__ == "__main__":
    emulator_group(prog_name="python -m cwtrain_emulator")
