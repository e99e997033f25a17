"""Drawing states inside SGLang: the plugin, the tap in the forward, and the writers beside it."""
