"""The page at ``/``: what runs here, for eyes. Static files and one route that they poll; nothing from elsewhere."""
