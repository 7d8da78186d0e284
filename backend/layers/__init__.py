"""Building blocks of models: functions of tensors with explicit arguments. No state but the weights they are given."""
