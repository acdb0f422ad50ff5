// rates_file.h - a file of measured rates: JSON that names the device, the precision and the threads that it
// was measured with, and is accepted only if these are the same.
#pragma once

#include <omp.h>

#include <cmath>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "llmc/file.h"
#include "llmc/options.h"
#include "llmc/rates.h"
#include "llmc/rates_device.h"
#include "llmc/simt.h"

constexpr int kRatesFormat = 2;
inline constexpr const char* kProductSides[] = {"m", "n", "k"};

// The device's name: a GPU's from its driver, a CPU's from the kernel. Empty if none is known.
inline std::string device_name() {
#if defined(SIMT_GPU)
    cudaDeviceProp properties;
    return cudaGetDeviceProperties(&properties, 0) == cudaSuccess ? properties.name : "";
#else
    std::string name;
    if (FILE* f = fopen("/proc/cpuinfo", "r")) {
        char line[256];
        while (name.empty() && fgets(line, sizeof line, f))
            if (const std::string text = line; text.starts_with("model name"))
                name = text.substr(std::min(text.find(": ") + 2, text.size()));
        fclose(f);
    }
    return name.substr(0, name.find('\n'));
#endif
}

// What rates depend on: they are valid only for the same values.
inline nlohmann::ordered_json measured_on(const char* precision) {
    nlohmann::ordered_json on = {{"device", kDevice}, {"name", device_name()}, {"precision", precision}};
    if (kHostIsDevice) on["threads"] = omp_get_max_threads();
    return on;
}

// Fails if a file cannot be written at `path`.
inline void check_rates_writable(const std::string& path) {
    { const FileWriter probe(name_before(path)); }
    unlink(name_before(path).c_str());
}

// Writes the measured rates, in place of any file at `path`.
inline void write_rates(const std::string& path, const Rates& rates, const char* precision) {
    nlohmann::ordered_json j = {{"rates", kRatesFormat}};
    j.update(measured_on(precision));
    const auto rounded = [](std::vector<double> values) {  // to five digits
        for (double& v : values) v = std::strtod(format("%.5g", v).c_str(), nullptr);
        return values;
    };
    for (const auto& [form, p] : rates.products) {
        nlohmann::ordered_json& of = j["products"][form];
        for (size_t d = 0; d < 3; d++) of[kProductSides[d]] = p.sizes[d];
        of["flops_per_second"] = rounded(p.rates);
    }
    for (const auto& [name, c] : rates.operations)
        j["operations"][name] = {{"sizes", rounded(c.sizes)}, {"per_second", rounded(c.rates)}};
    for (size_t route = 0; route < rates.transfers.size(); route++)
        if (std::isfinite(rates.transfers[route]))
            j["transfers"][kRouteNames[route]] = rounded({rates.transfers[route]})[0];
    if (std::isfinite(rates.ranks.network)) j["network"] = rounded({rates.ranks.network})[0];
    for (size_t route = 0; route < rates.beside.size(); route++)
        if (kHostIsDevice && (is_disks(static_cast<Route>(route)) || rates.beside[route] < 1))
            j["computing_beside"][kRouteNames[route]] = rounded({rates.beside[route]})[0];
    replace_text(path, j.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

// Reads a file of rates. If something is wrong with it, fails with one line that says where.
class RatesReader {
  public:
    RatesReader(std::string path, const char* precision) : path_(std::move(path)), precision_(precision) {}

    // `nominal` is for what the file has no rates of.
    Rates read(const DeviceRates& nominal) const {
        const nlohmann::json file = read_json(path_);
        if (!file.is_object() || !file.contains("rates"))
            fail("--rates %s is no file of --calibrate", path_.c_str());
        if (file["rates"] != kRatesFormat)
            fail("--rates %s is of another version; --calibrate makes it anew", path_.c_str());
        check_device(file);
        Rates rates(nominal);
        for (const auto& [form, p] : object(file, "products").items()) {
            const std::string where = "products " + form;
            ProductRates& of = rates.products[form];
            for (size_t d = 0; d < 3; d++) of.sizes[d] = rising(p, kProductSides[d], where);
            of.rates = positive(p, "flops_per_second", where);
            if (of.rates.size() != of.shapes()) wrong(where, "as many rates as shapes");
        }
        for (const char* form : {"NN", "NT", "TN"})
            if (!rates.products.contains(form)) wrong("products", std::string("the form ") + form);
        for (const auto& [name, c] : object(file, "operations").items()) {
            const std::string where = "operations " + name;
            RateCurve& of = rates.operations[name];
            of = {rising(c, "sizes", where), positive(c, "per_second", where)};
            if (of.rates.size() != of.sizes.size()) wrong(where, "as many rates as sizes");
        }
        if (!rates.operations.contains(kCopyRate)) wrong("operations", kCopyRate);
        rates.transfers[static_cast<size_t>(Route::ToRanks)] = 0;  // older files, and those of one device
        by_route(file, "transfers", rates.transfers);
        if (const auto network = file.find("network"); network != file.end())
            rates.ranks.network = number(*network, "network");
        if (kHostIsDevice) by_route(file, "computing_beside", rates.beside, 1);
        return rates;
    }

  private:
    [[noreturn]] void wrong(const std::string& where, const std::string& lacks) const {
        fail("--rates %s: %s lacks %s; --calibrate makes the file anew", path_.c_str(),
             printable(where).c_str(), printable(lacks).c_str());
    }
    void check_device(const nlohmann::json& file) const {
        const nlohmann::json here = measured_on(precision_);
        for (const auto& [key, now] : here.items()) {
            const auto then = file.find(key);
            if (key == "name" && now == "") continue;  // a plan needs no device
            if (then != file.end() && *then == now) continue;
            fail("--rates %s was measured with another %s: %s, here %s; --calibrate measures this",
                 path_.c_str(), key.c_str(), then == file.end() ? "none" : printable(then->dump()).c_str(),
                 printable(now.dump()).c_str());
        }
    }
    const nlohmann::json& object(const nlohmann::json& in, const std::string& name) const {
        const auto it = in.find(name);
        if (it == in.end() || !it->is_object() || it->empty()) wrong("the file", name);
        return *it;
    }
    double number(const nlohmann::json& value, const std::string& where, double most = kLargest) const {
        const double x = value.is_number() ? value.get<double>() : 0;
        if (!(x > 0)) wrong(where, "numbers above zero");
        if (x > most) wrong(where, format("numbers up to %g", most));
        return x;
    }
    // Reads a number for each direction that exists: on a CPU the disk's alone. Those between ranks may be
    // missing.
    void by_route(const nlohmann::json& file, const char* name, std::array<double, kRoutes>& to,
                  double most = kLargest) const {
        const nlohmann::json& from = object(file, name);
        for (size_t route = 0; route < to.size(); route++) {
            if (is_exchange(static_cast<Route>(route))) {
                if (!from.contains(kRouteNames[route])) continue;
            } else if (kHostIsDevice && !is_disks(static_cast<Route>(route))) {
                continue;
            }
            if (!from.contains(kRouteNames[route])) wrong(name, kRouteNames[route]);
            to[route] = number(from[kRouteNames[route]], name, most);
        }
    }
    std::vector<double> positive(const nlohmann::json& in, const char* name, const std::string& where) const {
        const auto it = in.is_object() ? in.find(name) : in.end();
        if (!in.is_object() || it == in.end() || !it->is_array() || it->empty()) wrong(where, name);
        std::vector<double> values;
        for (const nlohmann::json& value : *it) values.push_back(number(value, where));
        return values;
    }
    std::vector<double> rising(const nlohmann::json& in, const char* name, const std::string& where) const {
        std::vector<double> values = positive(in, name, where);
        if (std::adjacent_find(values.begin(), values.end(), std::greater_equal<>()) != values.end())
            wrong(where, "sizes that rise");
        return values;
    }

    static constexpr double kLargest = 1e30;
    const std::string path_;
    const char* const precision_;
};

// Makes launches split that would take longer than kLongestLaunch by these rates. Products, whose parts may
// use another algorithm, are split by the nominal rates alone: so a run has the same bits with any file.
inline void limit_launches(const Rates& rates, bool tf32) {
    if (kHostIsDevice) return;  // nothing ends a launch there
    const DeviceRates& nominal = rates.nominal;
    double attention = nominal.attention_flops > 0 ? nominal.attention_flops : nominal.flops;
    for (const auto& [name, curve] : rates.operations)
        if (name.starts_with("attention_forward") || name.starts_with("attention_backward"))
            attention = std::min(attention, curve.rates.back());
    longest_attention = kLongestLaunch * attention;
    longest_product = kLongestLaunch * (tf32 ? nominal.tf32_flops : nominal.flops);
}

// How the ranks of a run are connected. The rates may have what --calibrate has measured of that; the rest is
// nominal.
inline void set_rank_links(Rates& rates, const Options& o) {
    RankLinks& links = rates.ranks;
    double& link = rates.transfers[static_cast<size_t>(Route::ToRanks)];
    links.link_is_nominal = !rates.measured() || link == 0;
    if (links.link_is_nominal) link = nominal_transfers()[static_cast<size_t>(Route::ToRanks)];
    links.over_host_link = !kHostIsDevice && nominal_gpu().nvlink == 0;
    links.on_a_machine = std::min(o.devices, o.rank.on_this_machine);
    if (o.devices == links.on_a_machine) return;
    links.network_of = o.network > 0                  ? "--network"
                       : std::isfinite(links.network) ? kMeasured.data()
                                                      : "nominal";
    if (o.network > 0)
        links.network = o.network;
    else if (!std::isfinite(links.network))
        links.network = kNominalNetwork;
    rates.transfers[static_cast<size_t>(Route::ToMachines)] = links.network / links.on_a_machine;
}

// The rates that a run plans with: those of the file of --rates, or the nominal ones.
template <class T>
Rates rates_of(const Options& o, double threads = omp_get_max_threads()) {
    Rates nominal(nominal_rates<T>(threads));
    nominal.transfers = nominal_transfers();
    Rates rates = o.rates.empty() ? nominal : RatesReader(o.rates, dtype_name<T>()).read(nominal.nominal);
    set_rank_links(rates, o);
    return rates;
}
