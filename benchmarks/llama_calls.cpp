// llama.cpp's own reading of answers with calls of tools, for templates.py: a question per line of the input, in JSON,
// the reply per line of the output. With the argument "tests" it prints the answers in llama.cpp's tests/test-chat.cpp
// as such questions instead; templates.py puts a call of `record` in place of running them.

#include "chat.h"
#include "common.h"
#include "json.h"
#include "log.h"
#include "peg-parser.h"

#include <fstream>
#include <iostream>
#include <sstream>
#include <string>

template <typename Case> static void record(const std::string & path, const Case & one);

#define main run_tests
#include "test-chat-recorded.cpp"
#undef main

template <typename Case> static void record(const std::string & path, const Case & one) {
    const auto & params = one.params;
    if (params.tools.empty() || !params.json_schema.empty() || one.is_partial ||
        params.continue_final_message != COMMON_CHAT_CONTINUATION_NONE || !params.add_generation_prompt) {
        return;
    }
    common_json asked = {
        { "template",  path },
        { "tools",     common_chat_tools_to_json_oaicompat(params.tools) },
        { "parallel",  params.parallel_tool_calls },
        { "thinking",  params.enable_thinking },
        { "reasoning", params.reasoning_format != COMMON_REASONING_FORMAT_NONE },
        { "messages",  common_chat_msgs_to_json_oaicompat(params.messages) },
    };
    asked["outputs"] = common_json::array({ common_json({ { "text", one.input }, { "partial", false } }) });
    std::cout << asked.dump_safe() << "\n";
}

static common_json parsed(const common_chat_params & params, const common_json & output) {
    common_chat_parser_params parser(params);
    parser.parser.load(params.parser);
    try {
        const auto message = common_chat_parse(output.at("text"), output.at("partial").get<bool>(), parser);
        auto       calls   = common_json::array();
        for (const auto & call : message.tool_calls) {
            calls.push_back({ { "name", call.name }, { "arguments", call.arguments } });
        }
        return { { "said", message.content }, { "reasoning", message.reasoning_content }, { "calls", calls } };
    } catch (const std::exception & error) {
        return { { "error", std::string(error.what()) } };
    }
}

static common_json reply(const common_json & asked) {
    const auto templates = common_chat_templates_init(nullptr, read_file(asked.at("template")));

    common_chat_templates_inputs inputs;
    inputs.messages              = common_chat_msgs_parse_oaicompat(asked.at("messages"));
    inputs.tools                 = common_chat_tools_parse_oaicompat(asked.at("tools"));
    inputs.parallel_tool_calls   = asked.at("parallel").get<bool>();
    inputs.enable_thinking       = asked.at("thinking").get<bool>();
    inputs.add_generation_prompt = asked.value("generate", true);
    inputs.reasoning_format =
        asked.at("reasoning").get<bool>() ? COMMON_REASONING_FORMAT_AUTO : COMMON_REASONING_FORMAT_NONE;
    const auto params = common_chat_templates_apply(templates.get(), inputs);

    auto results = common_json::array();
    for (const auto & output : asked.at("outputs")) {
        results.push_back(parsed(params, output));
    }
    return {
        { "prompt",     params.prompt },
        { "generation", params.generation_prompt },
        { "opening",    params.thinking_start_tag },
        { "closings",   params.thinking_end_tags },
        { "results",    results },
    };
}

int main(int argc, char ** argv) {
    common_log_set_verbosity_thold(-1);
    if (argc > 1 && std::string(argv[1]) == "tests") {
        test_template_output_peg_parsers(false);
        return 0;
    }
    std::string line;
    while (std::getline(std::cin, line)) {
        common_json answer;
        try {
            answer = reply(common_json::parse(line));
        } catch (const std::exception & error) {
            answer = { { "error", std::string(error.what()) } };
        }
        std::cout << answer.dump_safe() << std::endl;
    }
}
