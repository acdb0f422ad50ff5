// rates_file.cpp - writes measured rates as JSON, and reads and checks such a file.
#include "llmc/rates.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/file.h"

using nlohmann::ordered_json;

constexpr int kRatesFormat = 2;
constexpr const char* kProductSides[] = {"m", "n", "k"};

std::string cpu_name() {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);)
        if (line.starts_with("model name")) return line.substr(std::min(line.find(": ") + 2, line.size()));
    return "";
}

void check_rates_writable(const std::string& path) {
    { const FileWriter probe(name_before(path)); }
    unlink(name_before(path).c_str());
}

void write_rates(const std::string& path, const Rates& rates, const ordered_json& on) {
    ordered_json j = {{"rates", kRatesFormat}};
    j.update(on);
    const auto rounded = [](std::vector<double> values) {  // to five digits
        for (double& v : values) v = std::strtod(format("%.5g", v).c_str(), nullptr);
        return values;
    };
    for (const auto& [form, p] : rates.products) {
        ordered_json& of = j["products"][form];
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
        if (kBuild.host_is_device && (is_disks(static_cast<Route>(route)) || rates.beside[route] < 1))
            j["computing_beside"][kRouteNames[route]] = rounded({rates.beside[route]})[0];
    replace_text(path, j.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

class RatesReader {
  public:
    RatesReader(std::string path, ordered_json on) : path_(std::move(path)), on_(std::move(on)) {}

    Rates read(const DeviceRates& nominal) const {
        const nlohmann::json file = read_json(path_);
        if (!file.is_object() || !file.contains("rates")) fail("--rates %s is no file of --calibrate", path_);
        if (file["rates"] != kRatesFormat)
            fail("--rates %s is of another version; --calibrate makes it anew", path_);
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
        rates.transfers[Route::ToRanks] = 0;  // older files, and those of one device
        by_route(file, "transfers", rates.transfers);
        if (const auto network = file.find("network"); network != file.end())
            rates.ranks.network = number(*network, "network");
        if (kBuild.host_is_device) by_route(file, "computing_beside", rates.beside, 1);
        return rates;
    }

  private:
    [[noreturn]] void wrong(const std::string& where, const std::string& lacks) const {
        fail("--rates %s: %s lacks %s; --calibrate makes the file anew", path_, printable(where),
             printable(lacks));
    }
    void check_device(const nlohmann::json& file) const {
        for (const auto& [key, now] : on_.items()) {
            const auto then = file.find(key);
            if (key == "name" && now == "") continue;  // a plan needs no device
            if (then != file.end() && *then == nlohmann::json(now)) continue;
            fail("--rates %s was measured with another %s: %s, here %s; --calibrate measures this", path_,
                 key, then == file.end() ? "none" : printable(then->dump()), printable(now.dump()));
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
            } else if (kBuild.host_is_device && !is_disks(static_cast<Route>(route))) {
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
    const ordered_json on_;
};

Rates read_rates(const std::string& path, const DeviceRates& nominal, const ordered_json& on) {
    return RatesReader(path, on).read(nominal);
}
