"""How an exported package is run. Nothing in here needs the exporter."""
