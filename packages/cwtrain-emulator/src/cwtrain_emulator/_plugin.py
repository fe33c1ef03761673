"""Entry point of this distribution in the `cwtrain` plugin group."""
