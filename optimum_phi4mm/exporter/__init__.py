"""How a component becomes a file: OnnxConfigs, capture, weight binding and the package's folder."""
