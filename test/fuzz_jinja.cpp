// fuzz_jinja.cpp - libFuzzer target: reads any bytes as a chat template, and runs it on a chat.

#include <string>

#include "llmc/jinja.h"
#include "test/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* input, size_t size) {
    static const jinja::Value messages = jinja::Value::from_json(nlohmann::ordered_json::parse(R"([
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": [{"type": "text", "text": "\u00e9\ud83d\ude42"}]},
        {"role": "assistant", "content": "x", "tool_calls": [
            {"function": {"name": "f", "arguments": {"a": [1, -2.5e300, null, true], "b": "<\u2028>"}}}]}])"));
    parse_or_refuse([&] {
        const jinja::Template used({reinterpret_cast<const char*>(input), size});
        used.render({{"messages", messages}, {"bos_token", jinja::Value::string("<s>")}}, size, std::tm{});
    });
    return 0;
}
