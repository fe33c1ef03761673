"""The object store: SeaweedFS started by the emulator, or one that is given; and a small client to read it."""
