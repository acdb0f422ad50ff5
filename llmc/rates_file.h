// rates_file.h - a file of measured rates: JSON that names the device, the precision and the threads that it
// was measured with, and is accepted only if these are the same.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "llmc/rates.h"

// The CPU's name by the kernel; empty if none is known.
std::string cpu_name();

// Fails if a file cannot be written at `path`.
void check_rates_writable(const std::string& path);

// Writes the rates that were measured `on` this device, in place of any file at `path`.
void write_rates(const std::string& path, const Rates& rates, const nlohmann::ordered_json& on);

// Reads a file of rates, measured `on` the same device. `nominal` is for what the file has no rates of. If
// something is wrong with it, fails with one line that says where.
Rates read_rates(const std::string& path, const DeviceRates& nominal, const nlohmann::ordered_json& on);
