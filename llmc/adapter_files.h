// adapter_files.h - reads adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors. Our
// own saves also have adapter_base.json (adapter.h). checkpoint.h writes them.
#pragma once

#include <string>

#include "llmc/adapter.h"

// Reads the adapter in a folder, for a model. Fails naming what is missing, belongs to another model, or is
// not supported.
AdapterConfig read_adapter(const std::string& folder, const ModelConfig& c);
